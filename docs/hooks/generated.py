"""What the site has beside the pages of docs/: pages of the checkout, and reference read from the code.

A line `<!-- generated: NAME [ARGUMENT] -->` of a page is replaced by what the function of that name returns. Nothing is
written into docs/, so what it returns is never older than the code.
"""

from __future__ import annotations

import argparse
import ast
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from prometheus_client.metrics import MetricWrapperBase

from streamadv.cli import make_parser
from streamadv.metrics import instruments
from streamadv.metrics.collectors import ArrayHistogram
from streamadv.run.manifest import DEFAULTS, RunSettings
from streamadv.settings import SECRETS, Settings
from streamadv.status import exported
from streamadv.store.urls import PREFIX

ROOT: Final = Path(__file__).parents[2]
#: Files of the checkout that are pages of the site.
OUTSIDE: Final = {
    "README.md": "start/readme.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "deploy/README.md": "project/deploy.md",
    "CHANGELOG.md": "project/changelog.md",
}
MARKER: Final = re.compile(r"^<!-- generated: (\w+)(?: (\S+))? -->$", re.MULTILINE)
LINK: Final = re.compile(r"\[([^\]\n]*(?:\n[^\]\n]*)?)\]\(([^)\s#]+)(#[^)\s]*)?\)")
LOADED: Final = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
HELP_COLUMNS: Final = 100
#: Members without underscore that only the package itself uses.
INTERNAL: Final = {
    "Batch": "make_delivered|metric_weights|delivered|layout",
    "Connection": "scripts|push|blocking|check|memory|note_failed_push",
    "Scorer": "work",
    "Ticket": "hand_out|watched_by",
}
#: Secrets that are no password of a user of the server.
USES: Final = {
    "VIEW_PASSWORD": "password of the page of `streamadv view`, needed with `--host`",
    "GATEWAY_SECRET": "signs the keys that `streamadv gateway` hands to agents",
}
#: What the reference of the package begins with.
FIRST: Final = ("Producer", "Group", "Rollout", "TrainerQueue", "Batch", "MicroBatch")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the checkout."""
    for path, uri in OUTSIDE.items():
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, then let links lead to pages of the site."""
    text = MARKER.sub(lambda match: GENERATORS[match[1]](*filter(None, [match[2]])), markdown)
    return LINK.sub(lambda match: _link(page.file, *match.groups()), text)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """A page is read without any other server. Raises PluginError for what a browser would load from one."""
    if outside := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri}: the page loads {outside[0]}")
    return output


def _link(source: File, text: str, path: str, anchor: str | None) -> str:
    """A link to a file of the checkout, as the site has it; a file that is no page loses its link."""
    unchanged = f"[{text}]({path}{anchor or ''})"
    if "://" in path or source.abs_src_path is None:
        return unchanged
    target = (Path(source.abs_src_path).parent / path).resolve()
    if not target.exists() or not target.is_relative_to(ROOT):
        return unchanged  # MkDocs complains
    name = target.relative_to(ROOT).as_posix()
    uri = OUTSIDE.get(name, name.removeprefix("docs/") if name.startswith("docs/") else None)
    if uri is None:
        return text
    return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(source.src_uri) or '.')}{anchor or ''})"


def commands() -> str:
    """`--help` of every command."""
    os.environ["COLUMNS"] = str(HELP_COLUMNS)
    return "\n".join(
        f"## {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n"
        for parser in _parsers(make_parser([]))
    )


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in dict.fromkeys(action.choices.values()):
                yield from _parsers(child)


def run_settings() -> str:
    """What all processes of a run share."""
    rows = [
        (f"`{name}`", _text({"shards": 1, **DEFAULTS}[name]), field.description)
        for name, field in RunSettings.model_fields.items()
    ]
    return _table("setting", "default", "meaning", rows)


def environment() -> str:
    """The variables of a process, and its secrets."""
    rows = [
        (f"`{PREFIX}{name.upper()}`", _text(field.default), field.description)
        for name, field in Settings.model_fields.items()
    ]
    for name in SECRETS:
        meaning = (
            USES.get(name)
            or f"password of the user {name.partition('_')[0].lower()}, for `streamadv config acl`"
        )
        rows += [
            (f"`{PREFIX}{name}`", "none", meaning),
            (f"`{PREFIX}{name}_FILE`", "none", "file that holds it"),
        ]
    return _table("variable", "default", "meaning", rows)


def metrics(whose: str) -> str:
    """The metrics of `processes`, or those of the `run`, which groupers and exporters export."""
    own = [
        item for item in vars(instruments).values() if isinstance(item, MetricWrapperBase | ArrayHistogram)
    ]
    rows = []
    described = [(item, family) for item in own for family in item.collect()]
    if whose == "run":
        described = [(family, family) for family in exported.families().values()]
    else:
        waits = (*instruments.WAITS.collect(), *instruments.BLOCKED.collect())
        described = [*((family, family) for family in waits), *described]
    for labelled, family in described:
        name = family.name + "_total" * (family.type == "counter")
        labels = getattr(labelled, "_labelnames", ())
        rows.append((f"`{name}`", family.type, ", ".join(labels), family.documentation))
    return _table("metric", "type", "labels", "meaning", rows)


def _text(value: object) -> str:
    return "none" if value in (None, ()) else str(value).lower() if isinstance(value, bool) else f"{value}"


def _table(*parts: Any) -> str:
    *head, rows = parts
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def names(module: str) -> str:
    """The public names of a module: those in its `__all__`, else its classes and functions without underscore."""
    folder = ROOT / module.replace(".", "/")
    tree = ast.parse((folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")).read_text())
    listed: list[str] = next(
        (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        ),
        [
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        ],
    )
    shown = [name for name in listed if name[0] != "_" and not _is_module(module, name)]
    if module == "streamadv":
        shown = [*FIRST, *(name for name in shown if name not in FIRST)]
    return "\n\n".join(f"::: {module}.{name}{_without(INTERNAL.get(name))}" for name in shown)


def _without(members: str | None) -> str:
    return f"\n    options:\n      filters: ['!^_', '!^({members})$']" if members else ""


def _is_module(package: str, name: str) -> bool:
    path = ROOT / package.replace(".", "/") / name
    return path.is_dir() or path.with_suffix(".py").exists()


GENERATORS: Final[dict[str, Callable[..., Any]]] = {
    "commands": commands,
    "environment": environment,
    "metrics": metrics,
    "names": names,
    "run_settings": run_settings,
}
