"""A transformers model in this process, asked as an `EngineClient` is: for examples and tests, not for speed.

Needs torch and a model, of `transformers` or any other whose call returns `logits`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ...errors import SettingError
from ...extras import require
from ...messages import brief
from .completion import LENGTH, Completion

require("LocalEngine", "torch")
import torch  # noqa: E402  after the check, which names the extra

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...weights import Loader


class _Asked(NamedTuple):
    prompt: list[int]
    max_tokens: int
    temperature: float
    stop: frozenset[int]
    answer: asyncio.Future[Completion]


class LocalEngine:
    """Samples from a causal language model, all requests that wait together as one batch.

    Args:
        model: `model(input_ids=, attention_mask=, position_ids=)` returns an object with `logits` [B, T, V]. If that
            also has `cache` (older: `past_key_values`), the next call gets it, and the new tokens alone.
        stop_ids: tokens that end a completion; they are part of it.
        max_batch: requests sampled together.
        version: of the weights; `load` sets another one.
        seed: of the sampling.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        stop_ids: Sequence[int] = (),
        max_batch: int = 64,
        version: int | None = None,
        seed: int = 0,
    ) -> None:
        self.version = version
        self._model = model
        self._stop = frozenset(stop_ids)
        self._max_batch = max_batch
        self._random = torch.Generator().manual_seed(seed)
        self._waiting: list[_Asked] = []
        self._at_work: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "streamadv-engine")  # also orders sampling and loading

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 1.0,
        stop_ids: Sequence[int] | None = None,
    ) -> Completion:
        """Sample at most `max_tokens` tokens; log-probs are those of the distribution sampled from.

        temperature: above 0. stop_ids: in place of those of the engine.
        """
        if not len(prompt_ids) or max_tokens < 1 or not temperature > 0:
            raise SettingError(
                f"complete: {len(prompt_ids)} prompt tokens, max_tokens {brief(max_tokens)}, temperature "
                f"{brief(temperature)}: each needs to be above 0"
            )
        stop = self._stop if stop_ids is None else frozenset(stop_ids)
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked([int(i) for i in prompt_ids], max_tokens, temperature, stop, answer))
        if self._at_work is None or self._at_work.done():
            self._at_work = asyncio.create_task(self._work())
        return await answer

    async def load(self, tensors: Mapping[str, Any], version: int) -> None:
        """Take over weights between two batches, by `model.load_state_dict`."""

        def take() -> None:
            self._model.load_state_dict(tensors)  # type: ignore[attr-defined]
            self.version = version

        await asyncio.get_running_loop().run_in_executor(self._thread, take)

    async def refresh(self, loader: Loader) -> int:
        """Take over the newest weights of a folder between two batches, unless they are loaded; returns their version.

        Raises WeightsMissingError if the folder has none.
        """

        def take() -> int:
            self.version = version = loader.refresh(self._model)
            return version

        if self.version is not None and self.version == loader.version and loader.is_current:
            return self.version
        return await asyncio.get_running_loop().run_in_executor(self._thread, take)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _work(self) -> None:
        await asyncio.sleep(0)  # whoever asks in this turn of the loop comes along
        while self._waiting:
            batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
            batch = [asked for asked in batch if not asked.answer.cancelled()]
            loop = asyncio.get_running_loop()
            try:
                completions = await loop.run_in_executor(self._thread, self._sample, batch)
            except Exception as error:
                for asked in batch:
                    if not asked.answer.done():
                        asked.answer.set_exception(error)
                continue
            for asked, completion in zip(batch, completions, strict=True):
                if not asked.answer.done():
                    asked.answer.set_result(completion)

    @torch.inference_mode()
    def _sample(self, batch: Sequence[_Asked]) -> list[Completion]:
        """Sample each request to its end. Prompts are padded on the left."""
        version = self.version
        ids: list[list[int]] = [[] for _ in batch]
        log_probs: list[list[float]] = [[] for _ in batch]
        reasons: list[str | None] = [None] * len(batch)
        width = max((len(asked.prompt) for asked in batch), default=0)
        padded = torch.tensor([[0] * (width - len(asked.prompt)) + asked.prompt for asked in batch])
        mask = torch.tensor([[0] * (width - len(asked.prompt)) + [1] * len(asked.prompt) for asked in batch])
        temperature = torch.tensor([[asked.temperature] for asked in batch])
        unread, cache = padded, dict[str, Any]()
        while None in reasons:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -unread.shape[1] :]
            output = self._model(input_ids=unread, attention_mask=mask, position_ids=positions, **cache)
            distribution = torch.log_softmax(output.logits[:, -1].float() / temperature, -1)
            sampled = torch.multinomial(distribution.exp(), 1, generator=self._random)
            chosen = distribution.gather(1, sampled)[:, 0].tolist()
            for number, (asked, token) in enumerate(zip(batch, sampled[:, 0].tolist(), strict=True)):
                if reasons[number] is None:
                    ids[number].append(token)
                    log_probs[number].append(chosen[number])
                    ended = token in asked.stop
                    full = len(ids[number]) >= asked.max_tokens
                    reasons[number] = "stop" if ended else LENGTH if full else None
            padded = torch.cat([padded, sampled], 1)
            kept = "cache" if hasattr(output, "cache") else "past_key_values"
            past = getattr(output, kept, None)
            unread, cache = (padded, {}) if past is None else (sampled, {kept: past})
            mask = torch.cat([mask, torch.ones_like(sampled)], 1)
        answers = zip(batch, ids, log_probs, reasons, strict=True)
        return [Completion(asked.prompt, tokens, logs, why, version) for asked, tokens, logs, why in answers]
