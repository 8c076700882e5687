"""Brings the trainer's newest weights into the engines: `streamadv gateway --load-weights`.

For vLLM started with VLLM_SERVER_DEV_MODE=1, one engine after the other, so that the others go on sampling. Requests
wait while theirs loads; the tokens before are of the old version and those after of the new one, and the engine says so
by spans. Its cache is emptied, so that log-probs are those of the weights that the version names.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..errors import SettingError
from ..messages import log_fields, one_line
from ..producer.async_producer import AsyncProducer
from ..producer.logic import HEARTBEAT_ERRORS
from ..producer.membership import Weights
from ..weights import path_from
from .engines import CommandError, Engine, Engines

logger = logging.getLogger(__name__)

_PAUSE: Final = "/pause?mode=keep"
_CACHE: Final = "/reset_prefix_cache?reset_running_requests=true"


class Loading:
    """One for all engines of a gateway. An engine has one gateway that loads its weights."""

    def __init__(self, producer: AsyncProducer) -> None:
        self._producer = producer
        self._has: dict[str, Weights] = {}  # what each engine was given, by its URL
        self._said: dict[str, str] = {}  # why one could not be, so far
        self._is_unheard = False  # the last look for weights has failed

    async def look(self, engines: Engines) -> None:
        """Load the newest weights wherever they are not; an engine that was started anew has none of the run."""
        producer = self._producer
        try:
            await producer._drive(producer._logic.membership.send_heartbeat(), patient=False)
            self._is_unheard = False
        except HEARTBEAT_ERRORS as error:
            level = logging.DEBUG if self._is_unheard else logging.WARNING
            self._is_unheard = True
            text, fields = "no look for weights, tries again: %s", log_fields("no_look", role="gateway")
            logger.log(level, text, one_line(str(error)), extra=fields)
        weights = producer.weights
        for engine in () if weights is None else engines.all:
            assert weights is not None
            if self._has.get(engine.url) != weights or engine.version != weights.version:
                engine.is_loaded = engine.is_loaded and engine.version is not None  # else started anew
                await self._load(engines, engine, weights)

    async def _load(self, engines: Engines, engine: Engine, weights: Weights) -> None:
        """Load, or say why not. An engine that has begun and failed stays paused: its weights are of no version."""
        version = {"new_version": str(weights.version)}
        try:
            with folder_of(weights) as folder:
                given = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                await engines.command(engine, _PAUSE)
                await engines.command(engine, "/collective_rpc", given)
            await engines.command(engine, _CACHE)
            await engines.command(engine, "/update_weight_version", version)
            await engines.command(engine, "/resume")
        except (CommandError, SettingError, OSError) as error:
            why = one_line(str(error))
            if self._said.get(engine.url) != why:
                self._said[engine.url] = why
                logger.warning(
                    "engine %s does not load version %d, tries again: %s; it needs vLLM 0.32, VLLM_SERVER_DEV_MODE=1 "
                    "and a disk shared with the trainer",
                    engine.url,
                    weights.version,
                    why,
                    extra=log_fields("weights_not_loaded", role="gateway"),
                )
            return
        self._has[engine.url], engine.version, engine.is_loaded = weights, weights.version, True
        self._said.pop(engine.url, None)
        fields = log_fields("weights_loaded", role="gateway")
        logger.info("engine %s has the weights of version %d", engine.url, weights.version, extra=fields)


@contextmanager
def folder_of(weights: Weights) -> Iterator[Path]:
    """The folder that an engine loads: the one that the trainer has named, or one with its file alone.

    Raises SettingError.
    """
    path = path_from(weights.uri).absolute()
    if path.is_dir():
        yield path
        return
    if not path.is_file():
        raise SettingError(f"{path} is not there")
    with tempfile.TemporaryDirectory(prefix=".load-", dir=path.parent) as folder:
        (Path(folder) / "model.safetensors").symlink_to(path)
        yield Path(folder)
