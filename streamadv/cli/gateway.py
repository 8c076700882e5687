"""`streamadv gateway`: agents speak to it as to OpenAI or Anthropic, and the run gets what was sampled."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path
from typing import Any, Final

from ..errors import SettingError
from ..extras import TO_SERVE
from ..gateway.access import url_of
from ..gateway.keys import Keys
from ..gateway.options import MODES, Options
from ..gateway.running import EXIT, Running
from . import INTERRUPTED, add_log_options, add_process_options, settings_from
from .parser import count, seconds, size

KEY_DAYS: Final = 30.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "gateway",
        help="lets agents that nobody can change play rollouts",
        description="Serves the APIs of OpenAI (chat completions, completions, responses) and Anthropic (messages) in "
        "front of inference engines, and pushes what they have sampled to the run. Each rollout has a key of its own, "
        "signed with the secret in STREAMADV_GATEWAY_SECRET_FILE. The first line of stdout is its URL.",
    )
    add_process_options(parser)
    parser.add_argument(
        "--engine", action="append", metavar="URL", help="an engine, or a router; several times for several"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="of the engines' model (default: the first that they list)"
    )
    _add_rules(parser)
    _add_place(parser)
    parser.add_argument(
        "--print-key",
        action="store_true",
        help=f"print a key that begins groups, valid {KEY_DAYS:g} days, and end",
    )
    parser.set_defaults(run=run, packages=TO_SERVE)
    _add_running(parser.add_subparsers(title="actions", metavar="ACTION"))


def _add_running(actions: Any) -> None:
    parser = actions.add_parser(
        "run",
        help="plays a group, each rollout by a process",
        usage="streamadv gateway run --gateway URL [options] -- COMMAND ...",
        description="Begins a group at a gateway and runs COMMAND once for each of its rollouts, with the variables by "
        "which agents find their engine. When the process ends, so does its rollout.",
    )
    add_log_options(parser)
    parser.add_argument("--run", dest="run_name", metavar="NAME", help="name of the run (STREAMADV_RUN)")
    parser.add_argument("--gateway", metavar="URL", help="of the gateway (STREAMADV_GATEWAY_URL)")
    parser.add_argument("--size", type=count, default=1, metavar="N", help="rollouts of a group (default 1)")
    parser.add_argument(
        "--groups", type=count, default=1, metavar="N", help="one after the other (default 1)"
    )
    parser.add_argument("--data-source", metavar="NAME", help="of the groups")
    parser.add_argument("--metadata", type=_object, metavar="JSON", help="of their trajectories")
    parser.add_argument(
        "--reward",
        default=EXIT,
        metavar="WHERE",
        help="exit: 1 for exit status 0, else 0; file: what COMMAND writes to the file STREAMADV_REWARD_FILE, a number "
        "or an object as POST .../end takes; a URL: what it answers to rollout and exit_status (default exit)",
    )
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        metavar="S",
        help="a process is ended, and its rollout fails, after so long",
    )
    parser.add_argument(
        "--finish",
        action="store_true",
        help="tell the gateway at the end that no more groups come; the run ends when nobody else begins any",
    )
    parser.set_defaults(run=run_processes, packages=())


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="auto",
        help="tokens: ask engines with tokens; chat: with messages (default: tokens where the engine can)",
    )
    parser.add_argument(
        "--sampling",
        type=_object,
        metavar="JSON",
        default={"temperature": 1.0},
        help='how the policy is sampled (default: {"temperature": 1.0})',
    )
    for option, text in {
        "--allow-sampling": "agents choose their own temperature, top_p and so on",
        "--allow-history": "a rollout may begin with messages of an assistant, such as examples",
        "--rerender": "in tokens mode: prompts as the template writes them, also where it changes earlier turns",
        "--live-streams": "streams of chat completions and completions leave while the engine samples, asked with "
        "messages; costs more processor time (default: streams are made of whole answers)",
        "--load-weights": "load the weights that the trainer names into the engines: vLLM 0.32 with "
        "VLLM_SERVER_DEV_MODE=1",
    }.items():
        parser.add_argument(option, action="store_true", help=text)
    for option, default, text in (
        ("--idle-s", 600.0, "a group ends after so long without a turn"),
        ("--answer-s", 1800.0, "an engine has so long for an answer"),
        ("--grace-s", 30.0, "a rollout fails so long after its client went away in the middle of an answer"),
        ("--max-open", 4096, "rollouts at once"),
        ("--max-turns", 32, "requests of one rollout at once"),
    ):
        kind, metavar = (seconds, "S") if option.endswith("-s") else (count, "N")
        shown = f"{text} (default {default:g})"
        parser.add_argument(option, type=kind, default=default, metavar=metavar, help=shown)
    parser.add_argument(
        "--max-body", type=size, default=64 << 20, metavar="SIZE", help="of a request (default 64mb)"
    )


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen at (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=0, metavar="P", help="TCP port (default: a free one)")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="its certificate, PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's key, PEM")
    parser.add_argument("--behind-proxy", action="store_true", help="something in front of it speaks TLS")
    parser.add_argument(
        "--public-url", metavar="URL", help="at which agents reach it, in what POST /v1/groups answers"
    )


def _object(text: str) -> dict[str, Any]:
    """Type of an option: an object in JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"is {text!r}, needs an object in JSON")
    return found


def run(arguments: argparse.Namespace) -> None:
    from ..gateway.server import Place, serve  # needs the packages of the extra

    settings, keys = settings_from(arguments), Keys.from_environment()
    if arguments.print_key:
        print(keys.sign("operator", settings.run, None, KEY_DAYS * 86400))
        return
    given = {name: getattr(arguments, name) for name in Options.__slots__ if name != "engines"}
    options = Options(tuple(arguments.engine or ()), **given)
    place = Place(
        arguments.host, arguments.port, arguments.tls_cert, arguments.tls_key, arguments.behind_proxy
    )
    if not 0 <= arguments.port <= 65535:
        raise SettingError(f"--port is {arguments.port}, needs 0 to 65535")
    asyncio.run(serve(settings, options, keys, place, lambda url: print(url, flush=True)))


def run_processes(arguments: argparse.Namespace) -> int:
    """Play groups by processes; 1 if a rollout could not be ended."""
    keys, settings = Keys.from_environment(), settings_from(arguments)
    group = {"size": arguments.size, "data_source": arguments.data_source, "metadata": arguments.metadata}
    running = Running(
        url_of(arguments.gateway),
        keys.sign("operator", settings.run, None, KEY_DAYS * 86400),
        arguments.commands[0] if arguments.commands else [],
        arguments.reward,
        arguments.timeout_s,
        {name: value for name, value in group.items() if value is not None},
    )
    try:
        return asyncio.run(_play(running, arguments.groups, arguments.finish))
    except asyncio.CancelledError:
        return INTERRUPTED


async def _play(running: Running, groups: int, finishes: bool) -> int:
    playing = asyncio.current_task()
    assert playing is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, playing.cancel)
    status = 0
    for _ in range(groups):
        for answer in await running.play():
            print(json.dumps(answer), flush=True)
            status |= answer is None
    if finishes:
        await running.finish()
    return status
