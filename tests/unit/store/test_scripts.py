"""Scripts: what they may contain, and that a server which forgot them is told again."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from streamadv.store import acl, scripts
from streamadv.store.connection import Connection

NAMES = list(scripts.files())
#: May be refused above maxmemory: they bring data in. `status`, `ahead` and `server_id` write nothing.
WRITERS_OF_NEW_DATA = {"push", "begin", "status", "server_id", "ahead"}


def test_a_script_has_its_name_alone() -> None:
    folder = resources.files("streamadv") / "lua"
    files = [path for path in Path(str(folder)).rglob("*.lua") if path.parent.name != "lib"]
    assert sorted(path.stem for path in files) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_script_says_what_it_takes_and_gives(name: str) -> None:
    text = scripts.files()[name].read_text()
    for word in ("KEYS", "ARGV", "Returns"):
        assert re.search(rf"^-- (KEYS and )?{word}  ", text, re.MULTILINE) or word not in text, word
    assert "Returns" in text


@pytest.mark.parametrize("name", NAMES)
def test_scripts_use_only_what_every_server_has(name: str) -> None:
    text = scripts.load(name).text
    assert "-- include" not in text
    assert not text.startswith("#!")
    assert not re.search(r"\b(cmsgpack|struct|bit)\.|sha1hex|'(KEYS|SCAN|EXPIRE)'", text)


@pytest.mark.parametrize("name", sorted(set(NAMES) - WRITERS_OF_NEW_DATA))
def test_the_first_write_of_a_script_needs_no_memory(name: str) -> None:
    body = scripts.files()[name].read_text()
    first = re.search(r"redis\.p?call\('(\w+)', (KEYS\[1\])", body)
    assert first is not None
    assert first[1] == "DEL"
    assert body.index(first[0]) == body.index("redis.")


def test_a_server_that_forgot_a_script_is_sent_its_text(fake: Connection) -> None:
    call = scripts.script_call("register", ["void", "runs"], ["r"])
    assert scripts.run_script(fake.scripts, call) == 1
    fake.scripts.script_flush()
    assert scripts.run_script(fake.scripts, call) == 0
    assert scripts.run_script(fake.scripts, call) == 0


async def test_also_by_asyncio() -> None:
    import fakeredis

    client = fakeredis.FakeAsyncRedis()
    call = scripts.script_call("register", ["void", "runs"], ["r"])
    assert await scripts.run_script_async(client, call) == 1
    await client.script_flush()
    assert await scripts.run_script_async(client, call) == 0
    await client.aclose()


def test_the_pipeline_may_call_every_command_of_every_script() -> None:
    """A new command in a script has to be one of the access rules as well."""
    texts = [scripts.load(name).text for name in NAMES]
    called = {match.lower() for text in texts for match in re.findall(r"redis\.p?call\('(\w+)'", text)}
    rules = {command.partition("|")[0] for text in acl.PIPELINE.rules.values() for command in text.split()}
    assert called - rules - {*acl.CONNECTION.split()} == set()
