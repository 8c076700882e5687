"""Policy weights as files: a folder that trainer and rollout engines share, with one safetensors file for each version.

The trainer publishes, engines refresh:

    uri = weights.publish(folder, batch.version + 1, model.state_dict())
    queue.trained(batch, weights=uri)

    loader = weights.Loader(folder)
    version = loader.refresh(model)  # loads the newest version unless it is loaded

A file is there whole or not at all, and says in its metadata which version it holds. Weights too large for files travel
as the engine prefers; `queue.trained(batch, weights=URI)` takes any URI.
"""

from __future__ import annotations

import importlib
import logging
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import numpy as np

from . import doors, extras
from .errors import SettingError, WeightsMissingError
from .messages import brief, log_fields, one_line, whole_number

logger = logging.getLogger(__name__)

#: Versions that `publish` keeps: readers may still be about to open them.
KEEP: Final = 8

_NAME: Final = re.compile(r"weights-(\d{6,15})\.safetensors")
_UNFINISHED: Final = re.compile(r"\.weights-(\d{6,15})\.safetensors\.\d+")
_VERSION: Final = re.compile("[0-9]{1,15}")
#: The last version that this process has published, by folder.
_last: dict[Path, int] = {}
#: Looks at the folder: each but the first follows a version that was removed in between.
_LOOKS: Final = 10

Apply = Callable[[dict[str, Any]], object]


def publish(
    folder: str | Path,
    version: int,
    tensors: Mapping[str, Any],
    *,
    keep: int = KEEP,
    keep_every: int | None = None,
) -> str:
    """Make a version readable for everybody, whole or not at all. Returns its `file:` URI, for `queue.trained`.

    The first version that a process publishes, and one that goes back, is the newest then: versions above it, from
    before the trainer went back to a checkpoint, are removed. Versions above a later one are those of a newer trainer.

    Args:
        folder: of one run; is created if need be.
        version: of the weights: `batch.version + 1` after training on `batch`.
        tensors: torch tensors on any device, or numpy arrays, by name: `model.state_dict()`. Names may share memory.
        keep: how many versions stay, this one and those before it.
        keep_every: versions that are multiples of it stay for good.

    Raises SettingError for a wrong argument, MissingDependencyError without safetensors.
    """
    version, keep = whole_number("version", version), whole_number("keep", keep, 1)
    keep_every = whole_number("keep_every", keep_every, 1, or_none=True)
    if not isinstance(tensors, Mapping):
        raise SettingError(f"tensors is {brief(tensors)}, needs tensors by name, such as model.state_dict()")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, version)
    with doors.whole_file(path) as unfinished:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        save(unfinished, tensors, {"version": str(version)})
        unfinished.chmod(mode)  # safetensors lets only the writer's user read, engines may be another's
    # Versions above one with which this process goes on are of a trainer that has replaced this one.
    goes_on = version > _last.get(folder.resolve(), version)
    _last[folder.resolve()] = version
    there = versions(folder)
    taken_back = [] if goes_on else [other for other in there if other > version]
    past = [other for other in there if other <= version - keep and (not keep_every or other % keep_every)]
    for other in (*taken_back, *past):
        path_of(folder, other).unlink(missing_ok=True)
    for left in folder.glob(".weights-*"):  # by processes that were killed
        if (match := _UNFINISHED.fullmatch(left.name)) and int(match[1]) <= version - keep:
            left.unlink(missing_ok=True)
    if taken_back:
        text = "%s: version %d is published, so versions %d to %d that lay there are taken back"
        logger.info(
            text, folder, version, taken_back[0], taken_back[-1], extra=log_fields("weights_taken_back")
        )
    return path.absolute().as_uri()


def versions(folder: str | Path) -> list[int]:
    """The versions that are there, from the oldest to the newest; none without the folder."""
    names = (path.name for path in Path(folder).glob("weights-*") if path.is_file())
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


def newest(folder: str | Path) -> int | None:
    """The newest version; None before the first."""
    return max(versions(folder), default=None)


def load(source: str | Path, target: Any) -> int:
    """Load a file into `target`; returns the version that it holds.

    Args:
        source: the file, or its URI as `publish` returned it.
        target: a torch module, or whatever has its `load_state_dict`; else a function, which gets numpy arrays by name.

    Raises WeightsMissingError when it is not there (any more), SettingError for what is no such file.
    """
    path = path_from(source)
    where = one_line(str(path))
    open_file: Any = _safetensors("safetensors").safe_open
    framework = "pt" if hasattr(target, "load_state_dict") else "np"
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO would stop all threads
            raise ValueError("no regular file")
        with open_file(path, framework) as file:
            text = (file.metadata() or {}).get("version", "")
            if not _VERSION.fullmatch(text):
                raise ValueError(f"version is {brief(text)}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    except FileNotFoundError:
        raise WeightsMissingError(f"{where} is not there: load the newest version of its folder") from None
    except (OSError, ValueError, _safetensors("safetensors").SafetensorError) as error:
        raise SettingError(f"{where} is no file of `weights.publish`: {one_line(str(error))}") from None
    except TypeError as error:
        raise SettingError(
            f"{where} holds what numpy has no dtype for ({error}): give a torch module as the target"
        ) from None
    apply: Apply = target.load_state_dict if framework == "pt" else target
    apply(tensors)
    return int(text)


class Loader:
    """Keeps a model at the newest version of a folder. One thread at a time uses it."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self.version: int | None = None
        """The version loaded last; None before the first."""

    @property
    def is_current(self) -> bool:
        """Whether the version loaded last is the newest one."""
        return self.version is not None and self.version == newest(self._folder)

    def refresh(self, target: Any) -> int:
        """Load the newest version into `target`, see `load`, unless it is loaded. Returns the version.

        Raises WeightsMissingError if the folder has none.
        """
        for _ in range(_LOOKS):
            version = newest(self._folder)
            if version is None:
                break
            if version == self.version:
                return version
            try:
                self.version = load(path_of(self._folder, version), target)
            except WeightsMissingError:
                continue  # removed meanwhile: a newer one is there, or the trainer has gone back
            return self.version
        raise WeightsMissingError(f"no weights in {self._folder}: the trainer has to publish some first")


def path_of(folder: str | Path, version: int) -> Path:
    """The file of a version."""
    return Path(folder) / f"weights-{version:06d}.safetensors"


def save(path: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write torch tensors or numpy arrays into a safetensors file."""
    if any(type(tensor).__module__.partition(".")[0] == "numpy" for tensor in tensors.values()):
        # safetensors writes the memory of an array, whatever its strides.
        arrays = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
        _safetensors("safetensors.numpy").save_file(arrays, path, metadata)
        return
    save_file = _safetensors("safetensors.torch").save_file  # before large tensors are copied
    seen: set[int] = set()
    apart = {}  # without memory in common, which the format does not know: tied weights are written twice
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    save_file(apart, path, metadata)


def path_from(source: str | Path) -> Path:
    """The path that a `file:` URI, or a path, names. Raises SettingError."""
    if isinstance(source, Path) or "://" not in source:
        return Path(source)
    try:
        parts = urlsplit(source)
    except ValueError as error:
        raise SettingError(f"weights URI {brief(source)}: {error}") from None
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise SettingError(f"weights URI {brief(source)}: only file: URIs of this machine can be loaded here")
    return Path(unquote(parts.path))


def _safetensors(name: str) -> Any:
    """A module of safetensors."""
    extras.require("weights as files", "safetensors")
    return importlib.import_module(name)
