"""Scripts: what their headers say is true, what they may contain, and that a server gets again what it forgot."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from streamadv.errors import EpochFencedError
from streamadv.run import Shard
from streamadv.store import acl, scripts
from streamadv.store.connection import Connection
from streamadv.store.keys import MANY_KINDS, EntryKeys, ShardKeys, key_patterns
from streamadv.store.scripts import parse_keys, run_script, run_script_async, script_call

NAMES = list(scripts.files())
KEYS = ShardKeys("r:0:0")
#: May be refused above maxmemory: they bring data in. `ahead` and `server_id` write nothing.
WRITERS_OF_NEW_DATA = {
    *("push", "cancel", "begin", "columns", "turn", "share"),
    *("server_id", "ahead", "read_prompt_ends", "keep_late"),
}


def test_a_script_has_its_name_alone() -> None:
    folder = resources.files("streamadv") / "lua"
    files = [path for path in Path(str(folder)).rglob("*.lua") if path.parent.name != "lib"]
    assert sorted(path.stem for path in files) == NAMES


@pytest.mark.processes
def test_a_process_without_free_descriptors_can_call_every_script() -> None:
    """They are read with the first one, at the start of a process."""
    code = """
import resource, sys
from streamadv.store import scripts

scripts.load("manifest")
resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
assert [scripts.load(name).name for name in sys.argv[1:]] == sys.argv[1:]
"""
    subprocess.run([sys.executable, "-c", code, *NAMES], check=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_script_says_what_it_takes_and_gives(name: str) -> None:
    text = scripts.files()[name]
    assert text.startswith("-- ")  # the key table takes its place
    for word in ("KEYS", "ARGV", "Returns"):
        assert re.search(rf"^-- {word}  \S", text, re.MULTILINE) or not re.search(rf"\b{word}\b", text), word
    assert "Returns" in text


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_one_of_the_run(name: str) -> None:
    script = scripts.load(name)
    names = [key.name for key in script.keys]
    assert len(names) == len({*names})
    for key in script.keys:
        assert {*key.kinds} <= key_patterns("r").keys()
        assert not key.from_caller or key.name in key.kinds or key.name not in key_patterns("r")
    lists = [key.is_list for key in script.keys]
    assert lists == sorted(lists)
    assert sum(key.is_list and not key.is_declared for key in script.keys) <= 1
    assert script.fence is None or script.fence in names


def without_idle_functions(text: str) -> str:
    """Without included functions that nothing calls."""
    for function, name in re.findall(
        r"^(local function (\w+)\([^\n]*\n.*?^end$)", text, re.MULTILINE | re.DOTALL
    ):
        if len(re.findall(rf"\b{name}\b", text)) == 1:
            return without_idle_functions(text.replace(function, ""))
    return text


@pytest.mark.parametrize("name", NAMES)
def test_scripts_use_the_keys_they_name_and_no_others(name: str) -> None:
    """By their names only, also in what they include."""
    script = scripts.load(name)
    body = without_idle_functions(re.sub("--.*", "", scripts.source(name)))
    assert not re.search(r"\bKEYS\b", body)
    used = {*re.findall(r"\bkeys\.(\w+)", body)}
    set_by_script = {*re.findall(r"\bkeys\.(\w+)(?:, \w+)* =[^=]", body)}
    named = {key.name for key in script.keys if not (key.is_void or key.is_declared)}
    assert named - used - {script.fence} == set()
    assert used - named - set_by_script == set()


def test_what_scripts_include_says_which_keys_it_uses() -> None:
    folder = Path(str(resources.files("streamadv"))) / "lua" / "lib"
    for file in folder.glob("*.lua"):
        text = file.read_text()
        used = {*re.findall(r"\bkeys\.(\w+)", re.sub("--.*", "", text))}
        named = {key.name for key in parse_keys(text)} if "-- KEYS  " in text else set()
        assert used <= named, file.name


@pytest.mark.parametrize("name", NAMES)
def test_scripts_use_only_what_every_server_has(name: str) -> None:
    text = scripts.load(name).text
    assert "--" not in text
    assert not text.startswith("#!")
    assert not re.search(r"\b(cmsgpack|struct|bit)\.|sha1hex|'(KEYS|SCAN|EXPIRE)'", text)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_write_of_a_script_needs_no_memory(name: str) -> None:
    script = scripts.load(name)
    assert script.keys[0].is_void == (name not in WRITERS_OF_NEW_DATA)
    text = script.text.removeprefix(scripts.ASK_FOR_MEMORY).lstrip()
    assert text.startswith("redis.call('DEL',KEYS[1])") == script.keys[0].is_void


FENCED = [name for name in NAMES if scripts.load(name).fence is not None]


@pytest.mark.parametrize("name", FENCED)
def test_a_fenced_script_changes_nothing_for_an_older_epoch(fake: Connection, name: str) -> None:
    script, full = scripts.load(name), {"output": KEYS.output("id")}
    given = {
        key.name: []
        if key.is_list
        else full.get(key.name) or getattr(KEYS, key.kinds[0])
        if key.from_caller
        else "id"
        for key in script.keys
        if key.from_caller or key.name in MANY_KINDS
    }
    for hash_name in (KEYS.session, KEYS.trainer):
        fake.scripts.hset(hash_name, "epoch", 5)
    stored = {key: fake.scripts.dump(key) for key in fake.scripts.scan_iter()}
    with pytest.raises(EpochFencedError, match="run r: another trainer has taken over"):
        Shard("r", 0, KEYS, fake).call(name, ["4 4-aa", *["1"] * 9], **given)
    assert {key: fake.scripts.dump(key) for key in fake.scripts.scan_iter()} == stored
    assert not re.search(r"return -1\b", scripts.source(name)), "says that the caller is fenced"


@pytest.mark.parametrize("name", NAMES)
def test_lines_keep_their_numbers_up_to_the_first_include(name: str) -> None:
    """So an error of the server leads to the line."""
    source = scripts.files()[name]
    text = scripts.load(name).text
    until = source.partition("-- include")[0].count("\n") if "-- include" in source else source.count("\n")
    for stored, sent in zip(source.splitlines()[1:until], text.splitlines()[1:until], strict=True):
        assert sent == stored.partition("--")[0].strip()


def test_the_header_says_where_a_call_goes() -> None:
    call = script_call("trained", KEYS, ["1 1-aa", 2, 3, "", "", ""], version=KEYS.session)
    keys = [KEYS.void, KEYS.session, KEYS.trainer, KEYS.session, KEYS.admission]
    assert call.arguments == [5, *keys, "1 1-aa", 2, 3, "", "", ""]
    call = script_call("touch", KEYS, ["g", 5, "p"], group="g")
    assert call.arguments == [
        5,
        KEYS.void,
        KEYS.open,
        KEYS.group("g"),
        KEYS.ledger,
        KEYS.trainer,
        "g",
        5,
        "p",
    ]
    call = script_call("sweep", KEYS, payloads=["a", "b"])
    assert call.arguments == [5, KEYS.void, KEYS.garbage, KEYS.ledger, "a", "b"]
    call = script_call("register", EntryKeys("r"), ["r"])
    assert call.arguments == [2, "{streamadv:runs}:void", "streamadv:runs", "r"]


def test_a_call_without_one_of_its_keys_is_an_error() -> None:
    with pytest.raises(TypeError, match="script touch: group= is missing"):
        script_call("touch", KEYS, ["g", 5, "p"])
    with pytest.raises(TypeError, match="script attempt takes no group"):
        script_call("attempt", KEYS, ["g", "1"], group="g")


@pytest.mark.parametrize("line", ["void, a b", "void,, a", "void; a", "a: b c", "a:b"])
def test_a_header_that_does_not_parse_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="KEYS"):
        parse_keys(f"-- Something.\n-- KEYS  {line}\n-- Returns  1\n")


def test_a_list_of_keys_may_be_empty_and_is_a_table(fake: Connection) -> None:
    fake.scripts.rpush(KEYS.garbage, "a 5", "b 6")
    fake.scripts.hset("a", "x", "1")
    assert run_script(fake.scripts, script_call("sweep", KEYS, payloads=[])) == 0
    assert run_script(fake.scripts, script_call("sweep", KEYS, ["c 1", "a 5"], payloads=["c", "a"])) == 1
    assert not fake.scripts.exists("a")
    assert fake.scripts.hget(KEYS.ledger, "live_bytes") == b"-5"


def test_a_server_that_forgot_a_script_is_sent_its_text(fake: Connection) -> None:
    call = script_call("register", EntryKeys("r"), ["r"])
    assert run_script(fake.scripts, call) == 1
    fake.scripts.script_flush()
    assert run_script(fake.scripts, call) == 0
    assert run_script(fake.scripts, call) == 0


async def test_also_by_asyncio() -> None:
    import fakeredis

    client = fakeredis.FakeAsyncRedis()
    call = script_call("register", EntryKeys("r"), ["r"])
    assert await run_script_async(client, call) == 1
    await client.script_flush()
    assert await run_script_async(client, call) == 0
    await client.aclose()


def test_the_pipeline_may_call_every_command_of_every_script() -> None:
    """A new command in a script has to be one of the access rules as well."""
    texts = [scripts.load(name).text for name in NAMES]
    called = {match.lower() for text in texts for match in re.findall(r"redis\.p?call\('(\w+)'", text)}
    rules = {command.partition("|")[0] for text in acl.PIPELINE.rules.values() for command in text.split()}
    assert called - rules - {*acl.CONNECTION.split()} == set()
