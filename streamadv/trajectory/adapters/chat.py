"""Chats as trajectories: any OpenAI-style list of messages as token ids, response mask and steps.

A turn is `<boundary of the role> text <end>`. The policy wrote the text of an assistant turn, its tool calls and its
end token, so these are response tokens (mask 1). All others have mask 0: system, user and tool turns, and the boundary
that opens an assistant turn.

Without a tokenizer, text becomes its UTF-8 bytes (ids 0 to 255) and a boundary one id of `BOUNDARY_IDS`, so that no
text can imitate a boundary. A tokenizer (any callable from text to ids) receives text and ChatML boundaries alike
(`<|im_start|>user`, `<|im_end|>`, each with a newline). To tokenise recorded text again may give other ids than the
engine sampled: push the engine's token ids if they exist.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ...errors import TrajectoryError
from ...messages import brief, one_line
from ..columns import Array
from ..schema import Trajectory, parse_trajectory
from .records import Record, field_name, group_name, index, ranks, read_records, required

Tokenizer = Callable[[str], Sequence[int]]

#: Turn boundaries of the byte tokenizer, whose vocabulary has 262 ids.
BOUNDARY_IDS: Final = {
    "end": 256,
    "system": 257,
    "developer": 258,
    "user": 259,
    "assistant": 260,
    "tool": 261,
}

#: Fields of a record beside `messages`: a trajectory's, without those that the messages determine.
RECORD_FIELDS: Final = frozenset(Trajectory.model_fields) - {"steps", "rows", "batch", "staleness"}

#: What other frameworks call these fields (verl, SkyRL: uid; slime: group_index; TRL: num_generations ...).
ALIASES: Final = {
    "group_id": ("uid", "group_index", "prompt_id", "traj_group_id", "instance_id", "task_id"),
    "rollout_index": ("repetition_id", "trial"),
    "group_size": ("num_generations", "n_samples_per_prompt", "attempts"),
    "model_version": ("policy_version", "generation_weight_version"),
}

#: Other recorders' names of a role.
_ROLE_NAMES: Final = {"function": "tool"}


class Turn(NamedTuple):
    """One message as text."""

    role: str
    text: str


class ChatTokens(NamedTuple):
    """One row and its steps, in the form that `push` and `parse_trajectory` accept."""

    input_ids: Array  # [T] int32
    response_mask: Array  # [T] uint8
    steps: list[dict[str, Any]]  # one per assistant turn: start, end, state_key


def read_chat(path: Path, tokenizer: Tokenizer | None = None) -> Iterator[Trajectory]:
    """Trajectories of a .json list or .jsonl file of records {group_id, rollout_index, messages, reward ...}.

    A record may have the other fields of a trajectory (`RECORD_FIELDS`), also under the names in `ALIASES`. Without
    `group_size` the reader counts the distinct rollout indices of the group in the file and, if they have gaps,
    renumbers them 0 .. n - 1 in order. `reward` null = unscorable, absent = a scorer brings it. Raises TrajectoryError.
    """
    records = read_records(path)
    members = ranks(_identity(record) for record in records)
    for record in records:
        names = {field: field_name(record, field, ALIASES.get(field, ())) for field in sorted(RECORD_FIELDS)}
        unknown = sorted(record.fields.keys() - set(names.values()) - {"messages"})
        if unknown:
            name = one_line(unknown[0])
            raise TrajectoryError(f"{record.where}: {name}: is no known field, move it into metadata")
        fields = {field: record.fields[name] for field, name in names.items() if name in record.fields}
        fields["group_id"], fields["rollout_index"] = _identity(record)
        if "group_size" not in fields:
            indices = members[fields["group_id"]]
            fields |= {"group_size": len(indices), "rollout_index": indices[fields["rollout_index"]]}
        yield chat_trajectory(record, "messages", tokenizer, fields)


def _identity(record: Record) -> tuple[str, int]:
    group_id, rollout_index = (field_name(record, f, ALIASES[f]) for f in ("group_id", "rollout_index"))
    return group_name(record, group_id), index(record, rollout_index)


def chat_trajectory(
    record: Record, field: str, tokenizer: Tokenizer | None, fields: Mapping[str, Any]
) -> Trajectory:
    """The trajectory of a record with messages in `field`; failed and aborted records may have none."""
    messages = required(record, field)
    columns: dict[str, Any] = {}
    if messages or fields.get("status") not in ("failed", "aborted"):
        columns = tokenize_chat(messages, tokenizer, record.where, field)._asdict()
    return parse_trajectory({**fields, **columns}, record.where)


def tokenize_chat(
    messages: Any, tokenizer: Tokenizer | None = None, where: str = "chat", field: str = "messages"
) -> ChatTokens:
    """The tokens of a chat: `messages` is a list of {role, content, tool_calls ...}.

    `content` is text, null or a list of text parts. A step is one assistant turn. Its `state_key` is the hash of its
    observation: the messages since the previous assistant turn, with names of tools and without ids of tool calls, so
    that two rollouts share a state if the same tool returned the same result. A turn after no new message has no key.

    Raises TrajectoryError, `where: field.3.content: problem`.
    """
    ids: list[int] = []
    mask: list[int] = []
    steps: list[dict[str, Any]] = []
    observation: list[Turn] = []
    for turn in _turns(messages, where, field):
        trained = turn.role == "assistant"
        ids += _boundary(turn.role, tokenizer)
        start = len(ids)
        mask += [0] * (start - len(mask))
        ids += _encode(turn.text, tokenizer)
        ids += _boundary("end", tokenizer)
        mask += [int(trained)] * (len(ids) - start)
        if trained:
            steps.append({"start": start, "end": len(ids), "state_key": state_key(observation)})
            observation = []
        else:
            observation.append(turn)
    if not steps:
        raise TrajectoryError(f"{where}: {field}: has no assistant message, so there is nothing to train on")
    try:
        return ChatTokens(np.array(ids, np.int32), np.array(mask, np.uint8), steps)
    except OverflowError as error:
        raise TrajectoryError(f"{where}: {field}: the tokenizer gave an id beyond int32") from error


def state_key(observation: Sequence[Turn]) -> str | None:
    """128-bit hash of the messages that an assistant turn answers; None without messages."""
    digest = hashlib.blake2b(digest_size=16)
    for role, text in observation:
        content = _encode(text, None)
        digest.update(f"{role} {len(content)} ".encode() + bytes(content))
    return digest.hexdigest() if observation else None


def _encode(text: str, tokenizer: Tokenizer | None) -> Sequence[int]:
    if tokenizer is None:
        return text.encode("utf-8", "surrogatepass")
    return tokenizer(text) if text else ()


def _boundary(name: str, tokenizer: Tokenizer | None) -> Sequence[int]:
    if tokenizer is None:
        return (BOUNDARY_IDS[name],)
    return tokenizer("<|im_end|>\n" if name == "end" else f"<|im_start|>{name}\n")


def _turns(messages: Any, where: str, field: str) -> Iterator[Turn]:
    if not isinstance(messages, list | tuple):
        raise TrajectoryError(f"{where}: {field}: is {brief(messages)}, needs a list of messages")
    for number, message in enumerate(messages):
        place = f"{where}: {field}.{number}"
        if not isinstance(message, Mapping):
            raise TrajectoryError(f"{place}: is {brief(message)}, needs an object with role and content")
        role = message.get("role")
        role = _ROLE_NAMES.get(role, role) if isinstance(role, str) else role
        if not isinstance(role, str) or role == "end" or role not in BOUNDARY_IDS:
            names = ", ".join(name for name in BOUNDARY_IDS if name != "end")
            raise TrajectoryError(f"{place}.role: is {brief(role)}, needs one of {names}")
        text = _content(message.get("content"), f"{place}.content")
        if role == "assistant":
            text = "\n".join(filter(None, [text, *_tool_calls(message, place)]))
        elif role == "tool" and message.get("name") is not None:
            text = f"{_text(message['name'], f'{place}.name')}\n{text}"
        elif message.get("content") is None:
            raise TrajectoryError(f"{place}.content: is missing or null, needs text")
        yield Turn(role, text)


def _content(content: Any, place: str) -> str:
    """The text of a message: a string, or the parts of a list end to end."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise TrajectoryError(f"{place}: is {brief(content)}, needs text, null or a list of parts")
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise TrajectoryError(f"{place}.{number}: is {brief(kind)}, needs a part with text")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(message: Mapping[str, Any], place: str) -> Iterator[str]:
    """Tool calls as text, one at a time. Ids are omitted: the engine makes them, not the policy."""
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise TrajectoryError(f"{place}.tool_calls: is {brief(calls)}, needs a list")
    functions = [
        (f"{place}.tool_calls.{number}", call.get("function", call) if isinstance(call, Mapping) else call)
        for number, call in enumerate(calls)
    ]
    if message.get("function_call") is not None:
        functions.append((f"{place}.function_call", message["function_call"]))
    for where, function in functions:
        if not isinstance(function, Mapping):
            raise TrajectoryError(f"{where}: is {brief(function)}, needs an object with a function")
        name = _text(function.get("name"), f"{where}.name")
        arguments = function.get("arguments")
        if arguments is None:
            arguments = "{}"
        elif not isinstance(arguments, str):
            arguments = _dump(arguments, f"{where}.arguments")
        yield f'<tool_call>\n{{"name": {_dump(name, where)}, "arguments": {arguments}}}\n</tool_call>'


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise TrajectoryError(f"{place}: is {brief(value)}, needs text")
    return value


def _dump(value: Any, place: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TrajectoryError(f"{place}: is no JSON: {one_line(str(error))}") from error
