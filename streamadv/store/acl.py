"""What each role may do on the server: access rules for Redis' and Valkey's ACL.

A rule names the commands that a role, or a script it calls, sends on each kind of key. Scripts run with their
caller's rights, so a role with a script of its own can do what its rules allow and no more. SECURITY.md says what
that means.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final

from .keys import MANY_KINDS, SINGLE_KINDS, key_patterns

#: What every connection needs, on one node or (the second line) on a cluster; none of them reads or writes a key.
CONNECTION: Final = "ping select info time role multi exec discard"
CLUSTER: Final = "asking cluster|slots command"

_PIPELINE: Final = (
    "del exists getrange hdel hexists hget hgetall hincrby hkeys hlen hmget hset hsetnx llen lpushx lrange lrem "
    "persist pexpire rename rpush setrange unlink xack xadd xclaim xdel xgroup|create xgroup|delconsumer "
    "xinfo|consumers xinfo|groups xinfo|stream xlen xpending xrange xread xreadgroup zadd zcard "
    "zrange zrangebyscore zrem zscore"
)


@dataclass(frozen=True)
class Role:
    """`rules`: kinds of keys (see `keys.key_patterns`) -> commands on them, in scripts or outside."""

    name: str
    rules: Mapping[str, str]
    scripts: bool = True  # whether it may run any


PRODUCER: Final = Role(
    "producer",
    {
        "manifest": "hgetall hsetnx",
        "manifest_void runs_void": "del",
        "runs": "hsetnx",
        "void": "del",
        "group": "hdel hexists hget hlen hmget hset hsetnx",
        "open": "zadd zcard zscore",
        "groups": "xlen",
        "ended ended_before": "hget hset",
        "ledger": "hincrby hmget",
        "sizes": "hdel hgetall hincrby",
        "trainer": "hmget",
        "admission": "xread",
        "rollouts scoring": "xadd",
        "scored": "rpush",
        "payload": "hset persist pexpire unlink",
        "producers": "hget hset",
        "session": "hget",
        "prompts": "hget hsetnx",
        "prompt_ends": "xrange",
        "prompt_state": "hget hincrby hmget hset hsetnx",
        "prompt_entries": "hdel hget hgetall hlen hmget hset",
        "prompt_again": "zadd zrange zrem",
        "prompt_solved": "getrange",
    },
)

PIPELINE: Final = Role(
    "pipeline",
    {
        "manifest": "hget hgetall hlen hsetnx",
        "manifest_void runs_void": "del",
        "runs": "hsetnx",
        " ".join((*SINGLE_KINDS, *MANY_KINDS)): _PIPELINE,
    },
)

OBSERVER: Final = Role(
    "observer",
    {
        "manifest runs": "hgetall",
        "ledger sizes evals trainer session owners producers dead_group": "hgetall",
        "open": "zcard zrange",
        "group": "hgetall hmget",
        "payload": "hmget",
        "ended ended_before batches": "hlen",
        "garbage": "llen",
        "results": "xinfo|stream xlen",
        "groups": "xinfo|stream xlen xrange",
        "rollouts work scoring": "xinfo|consumers xinfo|groups xinfo|stream xlen xrange",
        "dead": "zrange zscore",
        "malformed": "xrange",
        "prompts prompt_state prompt_entries": "hgetall",
        "prompt_given_up": "zrange",
        "prompt_ends": "xrevrange",
        "kept": "xrange xrevrange",
    },
    scripts=False,
)

ROLES: Final = (PRODUCER, PIPELINE, OBSERVER)


def password_hash(password: str) -> str:
    """The password as the server keeps it: SHA-256, in hex."""
    return hashlib.sha256(password.encode()).hexdigest()


def acl_line(role: Role, run: str, user: str, password_sha256: str) -> str:
    """The line of an ACL file that makes `user` this role of the run, and nothing else that it was before.

    Needs the selectors of Redis 7.0 or Valkey 7.2. Raises SettingError for a wrong run name.
    """
    words = ["user", user, "reset", "on", f"#{password_sha256}"]
    words += [f"+{command}" for command in f"{CONNECTION} {CLUSTER}".split()]
    patterns = key_patterns(run)
    by_commands: dict[str, list[str]] = defaultdict(list)
    for kinds, commands in role.rules.items():
        by_commands[commands] += [f"~{patterns[kind]}" for kind in kinds.split()]
    # A caller needs all rights on the keys that it names for a script; each command of the script is judged by itself.
    if role.scripts:
        by_commands = {"eval evalsha": list(dict.fromkeys(chain(*by_commands.values()))), **by_commands}
    for commands, of_keys in by_commands.items():
        words.append(f"({' '.join([*(f'+{command}' for command in commands.split()), *of_keys])})")
    return " ".join(words)
