"""Registers the trainers once verl's own are imported. verl imports this module at the end of `import verl`.

It does so in every process of a cluster, and its trainers take half a minute to import: hence not before they are asked
for.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from ...messages import log_fields

logger = logging.getLogger(__name__)

VERL_TRAINERS: Final = "verl.trainer.ppo.v1"
OUR_TRAINERS: Final = "streamadv.integrations.verl.trainer"


class _AfterVerlTrainers(MetaPathFinder):
    """Finds nothing itself: when verl's trainers are imported, ours are imported after them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != VERL_TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register()

            loader.exec_module = exec_module
        return spec


def register() -> None:
    """Import the trainers, which registers them. Says so if they cannot be: verl goes on without them."""
    try:
        importlib.import_module(OUR_TRAINERS)
    except ImportError as error:
        fields = log_fields("not_registered", role="verl")
        logger.warning("the trainers of streamadv are not registered with verl: %s", error, extra=fields)


if VERL_TRAINERS in sys.modules:
    register()
else:
    sys.meta_path.insert(0, _AfterVerlTrainers())
