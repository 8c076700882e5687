"""The simulated world itself: it replays exactly, kills for good, and cuts down what fails."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamadv import clock, doors
from streamadv.store.connection import Connection
from streamadv.testing import URL, World
from streamadv.testing import __main__ as command
from streamadv.testing.inspection import problems
from streamadv.testing.judge import run_schedule
from streamadv.testing.plan import cut_down
from streamadv.testing.strands import Stuck
from tests.support import trajectory


@pytest.fixture(autouse=True)
def _loud() -> Iterator[None]:
    """The command disables the log."""
    yield
    logging.disable(logging.NOTSET)


def test_a_seed_replays_exactly_and_so_do_its_choices() -> None:
    first, second = run_schedule(7)[0], run_schedule(7)[0]
    assert (first.trace, first.time, first.choices) == (second.trace, second.time, second.choices)
    again, _ = run_schedule(choices=first.choices)
    assert (again.trace, again.time) == (first.trace, first.time)


def test_seeds_differ() -> None:
    assert run_schedule(1)[0].trace != run_schedule(2)[0].trace


def test_the_doors_are_given_back() -> None:
    before = {name: getattr(doors, name) for name in ("Event", "Thread", "RLock", "pause", "random_bytes")}
    now, state = clock.now, random.getstate()
    with World(0) as world:
        world.start("p", lambda: world.sleep(1.0))
        world.run(lambda: world.time > 2.0)
    assert {name: getattr(doors, name) for name in before} == before
    assert (clock.now, random.getstate()) == (now, state)
    assert doors.client_options == {}


def test_time_passes_only_in_waits() -> None:
    seen = []
    with World(0, faults=()) as world:

        def main() -> None:
            began = clock.now()
            doors.sleep(3600.0)
            seen.append(clock.now() - began)

        world.start("p", main)
        world.run(lambda: bool(seen))
    assert 3600.0 <= seen[0] < 3600.1


def test_a_thread_outside_is_told_so_and_keeps_its_clock() -> None:
    told, times = [], []

    def outside() -> None:
        times.append(abs(clock.now() - time.monotonic()))
        try:
            Connection(URL).scripts.get("x")
        except Stuck as error:
            told.append(str(error))

    with World(0, faults=()) as world:

        def main() -> None:
            thread = threading.Thread(target=outside)
            thread.start()
            thread.join()
            assert Connection(URL).scripts.get("x") is None

        world.start("p", main)
        world.run(lambda: bool(told))
    assert "none of the world's" in told[0]
    assert times[0] < 60.0


def test_a_killed_process_does_nothing_any_more() -> None:
    done = []
    with World(0, faults=()) as world:

        def main() -> None:
            try:
                doors.sleep(10.0)
            finally:
                done.append("unwound")
                doors.sleep(10.0)
                done.append("went on")

        process = world.start("p", main)
        world.at(5.0, process.kill)
        world.run(lambda: not process.strands)
    assert done == ["unwound"]


def test_a_process_that_waits_for_nobody_is_not_waited_for() -> None:
    with World(0, faults=()) as world:
        world.start("p", lambda: doors.Event().wait())
        world.run(lambda: False)  # returns: nothing is left to happen
        assert world.time < 1.0


def test_a_loop_without_end_is_found() -> None:
    with World(0, faults=()) as world:

        def main() -> None:
            while True:
                world.sleep(0.0001)

        world.start("p", main)
        with pytest.raises(Stuck, match="without a pause"):
            world.run(lambda: False)


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for schedules in ("2", "3", "3"):
        arguments = ["--schedules", schedules, "--seed", "5", "--processes", "1", "--folder", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["streamadv.testing", *arguments])
        assert command.main() == 0
        shown.append(capsys.readouterr().out)
    assert ["(2 now" in shown[0], "(1 now" in shown[1], "(0 now" in shown[2]] == [True] * 3


def _push(world: World, acknowledged: list[str], count: int) -> Callable[[], None]:
    def main() -> None:
        import streamadv as sa

        with sa.Producer(URL, "r") as producer:
            for number in range(count):
                acknowledged.append(producer.push([trajectory(f"g{number}", 0, 1)]).codes[0])
                world.sleep(0.1)

    return main


def test_a_server_loses_its_last_writes_and_no_others() -> None:
    acknowledged: list[str] = []
    with World(0, faults=()) as world:
        process = world.start("p", _push(world, acknowledged, 20))
        world.run(lambda: len(acknowledged) == 10)
        process.kill()
        before = len(world.server.store.data[b"{r:0:0}:rollouts"].ids)
        world.crash(0.35, 1.0)
        assert 0 < before - len(world.server.store.data[b"{r:0:0}:rollouts"].ids) <= 4


@pytest.mark.parametrize(
    ("key", "field", "value", "said"),
    [
        (b"ledger", b"pushed", b"99", "99 trajectories are counted as pushed"),
        (b"group:g0", b"slots", b"uu", "group g0 has all its members, and is open"),
    ],
)
def test_a_look_in_between_finds_what_does_not_add_up(
    key: bytes, field: bytes, value: bytes, said: str
) -> None:
    acknowledged: list[str] = []
    with World(0, faults=()) as world:
        world.start("p", _push(world, acknowledged, 1))
        world.run(lambda: len(acknowledged) == 1)
        assert list(problems(world, "r")) == []
        world.server.store.data[b"{r:0:0}:" + key][field] = value
        assert any(said in text for text in problems(world, "r"))


def test_trouble_follows_the_death_of_a_server() -> None:
    with World(0) as world:
        process = world.start("p", lambda: world.sleep(60.0))
        for second in range(20):
            world.at(float(second), lambda: world.crash(0.0, 0.1))
        world.run(lambda: not process.strands)
        assert any(label.startswith("trouble") for label in world.choices)


@pytest.mark.parametrize("what", ["loading", "busy", "readonly", "misconf", "oom"])
def test_a_push_waits_while_the_server_refuses(what: str) -> None:
    acknowledged: list[str] = []
    with World(0, faults=()) as world:
        world.start("p", _push(world, acknowledged, 3))
        world.run(lambda: len(acknowledged) == 1)
        world.refuse(what, 20.0)
        world.run(lambda: len(acknowledged) == 3)
        assert world.time > 20.0
    assert acknowledged == ["pushed"] * 3


def test_choices_are_cut_down_to_those_that_count() -> None:
    choices = dict.fromkeys((f"c{number}" for number in range(60)), 1)
    assert cut_down(choices, lambda some: {"c7", "c41"} <= some.keys()) == {"c7": 1, "c41": 1}
