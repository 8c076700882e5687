"""Projects on one machine: folders of programs that the user owns, with a file that says what `streamadv up` starts."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, Final, NamedTuple

from ..errors import SettingError
from ..messages import one_line

#: In the current folder, its table `up` holds options of `streamadv up`.
FILE: Final = "streamadv.toml"
EXAMPLES: Final = ("tool_use",)

_FOLDER: Final = "projects"
_FILES: Final = (FILE, "tasks.jsonl", "policy.py", "producer.py", "judge.py", "trainer.py")
#: The file that differs between engines, by whether there is one.
_POLICIES: Final = {False: "policy_local.py", True: "policy_vllm.py"}
_LOCAL: Final = {"policy": "hidden_size = 64                    # of the model\nseed = 0\n", "lr": "2e-3"}


class Engine(NamedTuple):
    """An inference engine at `url`, and the model that it serves: a name or folder that transformers loads."""

    url: str
    model: str


def write_project(example: str, engine: Engine | None = None) -> list[Path]:
    """Write an example into a folder of its name, for the user to edit. Returns its files.

    engine: that samples; None: a small model made from a config, in the producer's process. Raises SettingError if one
    of the files exists.
    """
    folder = Path(example)
    if there := [name for name in _FILES if (folder / name).exists()]:
        raise SettingError(
            f"--example {example}: {folder}/ already has {', '.join(there)}: remove them, or go to another folder"
        )
    values = _LOCAL
    if engine is not None:
        quoted = {name: _quoted(value) for name, value in engine._asdict().items()}
        values = {"policy": "engine = {url}\nmodel = {model}\n".format(**quoted), "lr": "1e-6"}
    templates = resources.files("streamadv").joinpath(_FOLDER, example)
    texts = {
        name: templates.joinpath(_POLICIES[engine is not None] if name == "policy.py" else name).read_text()
        for name in _FILES
    }
    texts[FILE] = Template(texts[FILE]).substitute(values)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with (folder / name).open("x") as file:
            file.write(text)
    return [folder / name for name in _FILES]


def read_project(file: Path) -> tuple[list[str], list[list[str]]]:
    """What a project starts: options of `streamadv up` as words, and its commands. Raises SettingError."""
    try:
        table = tomllib.loads(file.read_text()).get("up")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{file}: {one_line(str(error))}") from None
    if not isinstance(table, Mapping):
        raise SettingError(f"{file}: has no table [up], which says what to start")
    words: list[str] = []
    for name, value in table.items():
        for item in value if isinstance(value, list) else [value]:
            if name != "commands" and item is not False:
                words += [f"--{name}"] if item is True else [f"--{name}={item}"]
    return words, [_words(file, command) for command in table.get("commands", [])]


def _words(file: Path, command: Any) -> list[str]:
    try:
        if isinstance(command, str) and (words := shlex.split(command)):
            return words
    except ValueError:  # a quotation without an end
        pass
    raise SettingError(
        f'{file}: commands: {command!r} is no command, needs a text such as "python trainer.py"'
    )


def _quoted(text: str) -> str:
    """As a literal string of TOML."""
    if "'" in text or not text.isprintable():
        raise SettingError(
            f"{one_line(text)!r} cannot stand in {FILE}: it has a quote or a control character"
        )
    return f"'{text}'"
