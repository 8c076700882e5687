"""Small breakages of scripts and Python, each of which schedules of the world have to find.

    python -m tests.world.mutants [--schedules 10000] [NAME ...]

runs schedules on a copy of the package with one breakage after the other, until one breaks a promise. EQUIVALENT says
why nothing can.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """Replace `old`, which the file has once, by `new`."""

    file: str
    old: str
    new: str


LUA: Final = "streamadv/lua"
MUTANTS: Final[dict[str, Mutant]] = {
    # Dedupe and groups
    "a push fills a slot twice": Mutant(
        f"{LUA}/group/push.lua",
        "~= string.rep('.', packet.count) then return nil end",
        "== '' then return nil end",
    ),
    "a push does not say which slots it has filled": Mutant(
        f"{LUA}/group/push.lua", "    group.slots = slots\n", ""
    ),
    "a payload is not kept": Mutant(
        f"{LUA}/group/push.lua", "redis.call('PERSIST', packet.key) == 0", "false"
    ),
    "a late push is not in the tombstone": Mutant(
        f"{LUA}/group/push.lua", "  redis.call('HSET', tombstones, id, tombstone)\n", ""
    ),
    "a group that has ended is opened again": Mutant(
        f"{LUA}/group/push.lua",
        "if tombstone then return push_late(spec.id, packets, tombstone, tombstones) end",
        "",
    ),
    "the grouper takes what another one has taken": Mutant(
        f"{LUA}/group/take.lua", "redis.call('XACK', keys.rollouts, ARGV[1], ARGV[i]) == 1", "true"
    ),
    "the grouper leaves entries in the stream": Mutant(
        f"{LUA}/group/take.lua",
        "count('rollouts_packets', -redis.call('XDEL', keys.rollouts, unpack(acked)))",
        "count('rollouts_packets', -#acked)",
    ),
    "a group is logged with its members twice": Mutant(
        f"{LUA}/lib/close.lua", "count('grouped', scored)", "count('grouped', 2 * scored)"
    ),
    "a group that ends stays open": Mutant(
        f"{LUA}/lib/close.lua", "  redis.call('ZREM', keys.open, group.id)\n", ""
    ),
    "a group that ends keeps its hash": Mutant(
        f"{LUA}/lib/close.lua", "  redis.call('DEL', group.hash)\n", ""
    ),
    "a group that ends has no tombstone": Mutant(
        f"{LUA}/lib/close.lua",
        "remembered + redis.call('HSET', keys.ended, group.id, letter .. tombstone_of(group))",
        "remembered + 1",
    ),
    "a deadline counts at once": Mutant(
        f"{LUA}/group/expire.lua", "deadline > now or waiting_since <= deadline", "false"
    ),
    "a deadline never counts": Mutant(
        f"{LUA}/group/expire.lua", "deadline > now or waiting_since <= deadline", "true"
    ),
    "withdrawn groups stay": Mutant(f"{LUA}/group/expire.lua", "if is_withdrawn(group) then", "if false then"),
    "a group is not withdrawn": Mutant(
        f"{LUA}/group/withdraw.lua", "redis.call('ZADD', keys.open, 0, ARGV[1])", ""
    ),
    # Batches
    "a batch is named twice": Mutant(
        f"{LUA}/batch/name_batch.lua",
        "if redis.call('HSETNX', keys.batches, ARGV[2], ARGV[3]) == 0 then return 0 end",
        "redis.call('HSET', keys.batches, ARGV[2], ARGV[3])",
    ),
    "a batch has no fence": Mutant(f"{LUA}/batch/name_batch.lua", "-- fenced by session\n", ""),
    "work is handed out twice": Mutant(
        f"{LUA}/batch/apply_batch.lua",
        "if redis.call('HEXISTS', keys.applied, ARGV[2]) == 1 then return 0 end",
        "",
    ),
    "work is not handed out": Mutant(
        f"{LUA}/batch/apply_batch.lua",
        "for i = last + 1, #ARGV do redis.call('XADD', keys.work, '*', 'work', ARGV[i]) end",
        "",
    ),
    "a batch in flight stays grouped": Mutant(
        f"{LUA}/batch/apply_batch.lua",
        "redis.pcall('HINCRBY', keys.ledger, 'grouped', string.format('%d', -count))",
        "",
    ),
    "results are published twice": Mutant(
        f"{LUA}/batch/publish.lua", "redis.call('XACK', keys.work, ARGV[1], ARGV[2]) == 1", "true"
    ),
    "an output is not kept": Mutant(
        f"{LUA}/batch/publish.lua", "redis.call('PERSIST', keys.output) == 0", "false"
    ),
    "a work item stays in its stream": Mutant(
        f"{LUA}/batch/publish.lua", "if first then redis.call('XDEL', keys.work, ARGV[2]) end\n", ""
    ),
    "a commit leaves the groups": Mutant(
        f"{LUA}/batch/commit.lua",
        "if redis.call('XDEL', keys.groups, entry) == 1 then",
        "if redis.call('XLEN', keys.groups) > 0 then",
    ),
    "a commit counts nothing": Mutant(
        f"{LUA}/batch/commit.lua", "count('trained', trained - left_out)", ""
    ),
    "a commit leaves the payloads": Mutant(
        f"{LUA}/batch/commit.lua",
        "redis.call('UNLINK', unpack(gone, first, math.min(#gone, first + UNLINKED - 1)))",
        "",
    ),
    "a commit leaves the record": Mutant(
        f"{LUA}/batch/commit.lua", "  redis.call('HDEL', keys.batches, ARGV[3])\n", ""
    ),
    "a new session has the epoch before": Mutant(
        f"{LUA}/batch/take_epoch.lua",
        "math.max(current, tonumber(ARGV[2])) + 1)",
        "math.max(current, tonumber(ARGV[2]), 1))",
    ),
    "the version does not move": Mutant(
        f"{LUA}/batch/trained.lua", "redis.call('HSET', keys.trainer, 'version', ARGV[2])", ""
    ),
    "nobody is told that there is room": Mutant(f"{LUA}/batch/trained.lua", "announce()\n", ""),
    "garbage stays": Mutant(
        "streamadv/grouping/housekeeping.py", "items: Any = shard.connection.scripts.lrange(key, 0, count - 1)",
        "items: Any = []",
    ),
    # Producer
    "pushes are not kept for a server that loses them": Mutant(
        "streamadv/producer/resend.py", "        if self._seconds <= 0:\n            return\n", "        return\n"
    ),
    "a heartbeat sends nothing again": Mutant(
        "streamadv/producer/logic.py",
        "has_all = yield from self._resend.check(manifest.keys.shards, first=say_open)",
        "has_all = True",
    ),
    "what another server has is not in doubt": Mutant(
        "streamadv/producer/resend.py", "sent.server_id != servers[sent.shard]]", "sent.server_id is None]"
    ),
    "a producer does not say that it goes": Mutant(
        "streamadv/producer/logic.py", "elif has_all and membership.closed:", "elif False:"
    ),
    # Consumers and trainer
    "what was pending is not read again": Mutant(
        "streamadv/run/consumer.py", "        self.pending_from: str | None = FIRST\n",
        "        self.pending_from: str | None = None\n",
    ),
    "a lease never ends": Mutant(
        "streamadv/run/consumer.py", "while cursor.expired:", "while cursor.expired and False:"
    ),
    "a checkpoint does not know its groups": Mutant(
        "streamadv/batch/progress.py", '            "groups": self.groups,\n', '            "groups": [],\n'
    ),
    "groups in the weights are trained on again": Mutant(
        "streamadv/batch/progress.py",
        "return group_id in self._uncommitted or group_id in self._committed or group_id in self._returning",
        "return False",
    ),
    "a group in hand is forgotten with its server": Mutant(
        "streamadv/batch/progress.py", "self._returning if k < self._named_elsewhere else ", ""
    ),
    "a late heartbeat takes the end back": Mutant(
        "streamadv/producer/logic.py", "yield from membership.send_heartbeat()\n        manifest",
        "yield from membership.send_heartbeat(\"\" if membership.finished else \"open\")\n        manifest",
    ),
    "a commit is not repeated": Mutant(
        "streamadv/batch/recovery.py", "for k in [k for k in sorted(recorded) if k < below]:", "for k in list[int]():"
    ),
    # Kept groups
    "what is kept is deleted": Mutant(
        f"{LUA}/batch/commit.lua", "if not (logged and keep_trained(", "if true or not (logged and keep_trained("
    ),
    "what is kept is swept": Mutant(
        f"{LUA}/lib/complete.lua",
        "if kept then return count('live_bytes', -kept) end", "if kept then count('live_bytes', -kept) end",
    ),
    "a commit keeps what is committed already": Mutant(
        f"{LUA}/batch/commit.lua",
        "  if redis.call('XDEL', keys.groups, entry) == 1 then\n    groups",
        "  if logged then keep_trained(logged[2]) end\n"
        "  if redis.call('XDEL', keys.groups, entry) == 1 then\n    groups",
    ),
    "a kept group is not counted": Mutant(
        f"{LUA}/lib/keep.lua",
        "  redis.pcall('HINCRBY', keys.ledger, 'kept_bytes', string.format('%d', bytes))\n", "",
    ),
    "what is trimmed stays": Mutant(
        f"{LUA}/group/trim_kept.lua", "    redis.call('RPUSH', keys.garbage, item)\n", ""
    ),
    "a dropped group is not kept": Mutant(
        f"{LUA}/lib/complete.lua", "if #packets > 0 and", "if #packets > 1 and"
    ),
}  # fmt: skip
#: Name -> why no schedule can find it.
EQUIVALENT: Final[dict[str, str]] = {}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world.mutants", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="*", help="the first words of some of them")
    given = parser.parse_args()
    wanted = [name for name in MUTANTS if not given.names or name.startswith(tuple(given.names))]
    survived = [name for name in wanted if not _is_found(name, given.schedules, given.seed)]
    print(f"{len(wanted) - len(survived)} of {len(wanted)} were found")
    return int(bool(set(survived) - set(EQUIVALENT)))


def _is_found(name: str, schedules: int, seed: int) -> bool:
    mutant = MUTANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "streamadv", Path(folder) / "streamadv")
        file = Path(folder) / mutant.file
        file.write_text(file.read_text().replace(mutant.old, mutant.new))
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "streamadv.testing",
            "--until-one",
            "--folder",
            f"{folder}/world",
        ]
        numbers = ["--schedules", str(schedules), "--seed", str(seed)]
        environment = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(
            [*command, *numbers], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    print(f"{name}: {(done.stdout or done.stderr[-300:]).strip().splitlines()[0][:160]}", flush=True)
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
