"""Loading the user's code: modules, functions, and estimators of installed packages.

A module is searched among Python's packages and in the current directory.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

from .errors import SettingError
from .extras import EXTRAS, remedy
from .messages import brief, log_fields, one_line

logger = logging.getLogger(__name__)

#: Entry points of this group are loaded when somebody asks for an estimator that is not registered yet.
ESTIMATORS: Final = "streamadv.estimators"
#: Entry points of this group are panels of the page of `streamadv view`.
VIEWS: Final = "streamadv.views"
#: How to bring an estimator, for messages.
REMEDY: Final = f"bring it with --import MODULE, or by an entry point of the group {ESTIMATORS}"


def import_module(name: str, option: str = "--import") -> ModuleType:
    """Import a module. Raises SettingError, which names `option`, for whatever the import raises."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        text = f"{option} {name}: cannot be imported: {type(error).__name__}: {error}"
        hint = _missing_extra(error) or f"looked for beside Python's packages and in {folder}"
        raise SettingError(one_line(f"{text} ({hint})")) from error


def _missing_extra(error: BaseException) -> str | None:
    """How to install the package that an import misses, if an extra brings it."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return None if missing is None or missing not in EXTRAS else remedy(missing)


def function_of(target: str) -> Callable[..., Any]:
    """The function that 'MODULE:FUNCTION' names (FUNCTION may have dots). Raises SettingError."""
    module, _, path = target.partition(":")
    if not module or not path:
        raise SettingError(f"{brief(target)} is no function: write MODULE:FUNCTION")
    function: Any = import_module(module, "module")
    for name in path.split("."):
        function = getattr(function, name, None)
    if not callable(function):
        raise SettingError(f"{target}: module {module} has no function {path}")
    return cast(Callable[..., Any], function)


_loaded = False


def load_estimators() -> None:
    """Import what entry points name, once. One that fails is logged as a warning and does not stop the others."""
    global _loaded
    if _loaded:
        return
    _loaded = True  # an estimator's module may ask for another one
    load_points(ESTIMATORS)


def load_points(group: str) -> dict[str, Any]:
    """What the entry points of a group name. One that fails is logged as a warning and does not stop the others."""
    found = {}
    for point in metadata.entry_points(group=group):
        try:
            found[point.name] = point.load()
        except (Exception, SystemExit) as error:
            package = point.dist.name if point.dist is not None else "unknown"
            text = f"entry point {point.name} = {point.value} of package {package} cannot be loaded"
            hint = f" ({missing})" if (missing := _missing_extra(error)) else ""
            fields = log_fields("entry_point_failed")
            logger.warning("%s: %s: %s%s", text, type(error).__name__, error, hint, extra=fields)
    return found
