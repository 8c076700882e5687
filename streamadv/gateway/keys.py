"""Keys of rollouts: a ticket without its metadata, signed. Whoever has the secret can read one; nobody stores any.

Each key has one purpose. Whoever plays a rollout has a key for turns, and cannot reward or end itself with it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import struct
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, Self

from .. import doors
from ..errors import SettingError, StreamadvError
from ..producer.tickets import Ticket
from ..store.keys import check_run_name
from ..store.urls import PREFIX, secret_from

Purpose = Literal["turn", "end", "operator"]

SECRET: Final = "GATEWAY_SECRET"
#: Secrets that are valid at a time: the first one signs, a second one is on its way out.
MAX_SECRETS: Final = 2
MIN_SECRET: Final = 16  # characters
#: Seconds that a key is valid. What revokes it before is the end of its rollout.
KEY_S: Final = 86400.0
#: No key is longer: a group's id has at most 200 characters, so has a round.
MAX_KEY: Final = 1200

#: Valid keys that are remembered.
CACHED: Final = 1024

_PREFIX: Final = "sa1-"
_CONTEXT: Final = b"streamadv gateway key 1\0"
_MAC_BYTES: Final = 18
_PURPOSES: Final[Mapping[bytes, Purpose]] = {b"t": "turn", b"e": "end", b"o": "operator"}
_LETTERS: Final = {purpose: letter for letter, purpose in _PURPOSES.items()}
# Purpose, whether the id is a UUID and the role eval, end, index, size, slots, epoch, version, deadline, columns.
_HEAD: Final = struct.Struct(">c??IHHHQqfQ")
_NO_VERSION: Final = -1


class BadKeyError(StreamadvError):
    """Something that is no valid key. Says nothing of why: whoever guesses learns nothing."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a key allows."""

    purpose: Purpose
    run: str
    ticket: Ticket | None
    """None for an operator's key, which begins groups."""


class Keys:
    """Signs and reads keys. secrets: the first one signs, each is accepted."""

    def __init__(self, secrets: Sequence[str]) -> None:
        if not 1 <= len(secrets) <= MAX_SECRETS or any(len(secret) < MIN_SECRET for secret in secrets):
            raise SettingError(
                f"{PREFIX}{SECRET}: has {len(secrets)} secrets, the shortest of "
                f"{min(map(len, secrets), default=0)} characters; needs one, or two while it is replaced, of at least "
                f"{MIN_SECRET} characters each, with a blank or a new line between them"
            )
        self._secrets = [secret.encode() for secret in secrets]
        self._read = lru_cache(CACHED)(self._read_anew)  # an agent brings its key with each turn

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """By STREAMADV_GATEWAY_SECRET or the file that STREAMADV_GATEWAY_SECRET_FILE names. Raises SettingError."""
        text = secret_from(SECRET, os.environ if environment is None else environment)
        if text is None:
            raise SettingError(
                f"no secret is given that signs keys: put one into a file, such as `openssl rand -hex 32` prints, and "
                f"set {PREFIX}{SECRET}_FILE to its path, for the gateway and for producers that hand rollouts out"
            )
        return cls(text.split())

    def sign(self, purpose: Purpose, run: str, ticket: Ticket | None, ttl_s: float = KEY_S) -> str:
        """A key that is valid for `ttl_s` seconds."""
        body = _packed(purpose, run, ticket, doors.wall() + ttl_s)
        text = base64.urlsafe_b64encode(body + _mac(self._secrets[0], body)).rstrip(b"=").decode()
        return _PREFIX + text

    def open(self, key: str, run: str) -> Claim:
        """What a key allows in this run. Raises BadKeyError."""
        try:
            claim, ends = self._read(key)
        except (ValueError, IndexError, struct.error, SettingError):
            raise BadKeyError("this is no valid key of the run") from None
        if claim.run != run or doors.wall() > ends:
            raise BadKeyError("this is no valid key of the run")
        return claim

    def _read_anew(self, key: str) -> tuple[Claim, float]:
        if not key.startswith(_PREFIX) or len(key) > MAX_KEY or not key.isascii():
            raise ValueError("prefix or length")
        text = key.removeprefix(_PREFIX)
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        # All are compared, so that time tells nothing of which one has signed.
        if not sum([hmac.compare_digest(mac, _mac(secret, body)) for secret in self._secrets]):
            raise ValueError("signature")
        return _unpacked(body)


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, _CONTEXT + body, hashlib.sha256)[:_MAC_BYTES]


def _packed(purpose: Purpose, run: str, ticket: Ticket | None, ends: float) -> bytes:
    if ticket is None:
        ticket = Ticket("", 0, 0, 0, 0, None)
    group_id, is_uuid = ticket.group_id.encode(), False
    with suppress(ValueError):  # a UUID in its usual form takes 16 bytes
        value = uuid.UUID(ticket.group_id)
        if str(value) == ticket.group_id:
            group_id, is_uuid = value.bytes, True
    version = _NO_VERSION if ticket.model_version is None else ticket.model_version
    counts = (ticket.rollout_index, ticket.group_size, ticket.slots, ticket.epoch, version)
    is_eval = ticket.role == "eval"
    head = _HEAD.pack(
        _LETTERS[purpose], is_uuid, is_eval, int(ends), *counts, ticket.deadline_s or 0.0, ticket.columns
    )
    texts = [group_id, (ticket.round or "").encode(), run.encode()]
    return head + b"".join(struct.pack(">H", len(text)) + text for text in texts)


def _unpacked(body: bytes) -> tuple[Claim, float]:
    letter, is_uuid, is_eval, ends, index, size, slots, epoch, version, deadline_s, columns = (
        _HEAD.unpack_from(body)
    )
    texts, at = [], _HEAD.size
    for _ in range(3):
        (length,) = struct.unpack_from(">H", body, at)
        texts.append(body[at + 2 : at + 2 + length])
        at += 2 + length
    group, round_name, run = texts
    purpose = _PURPOSES.get(letter)
    if purpose is None or at != len(body):
        raise ValueError("form")
    if purpose == "operator":
        return Claim(purpose, check_run_name(run.decode()), None), ends
    ticket = Ticket(
        str(uuid.UUID(bytes=group)) if is_uuid else group.decode(),
        index, size, slots, epoch,
        None if version == _NO_VERSION else version,
        role="eval" if is_eval else "train",
        deadline_s=deadline_s or None,
        round=round_name.decode() or None,
        columns=columns,
    )  # fmt: skip
    return Claim(purpose, check_run_name(run.decode()), ticket), ends
