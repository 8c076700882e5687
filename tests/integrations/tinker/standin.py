"""A server of the Tinker protocol in this process: a table of next tokens, whose states are files.

It takes the SDK's own types, and gives what `streamadv` reads of them: their constructors differ between versions. As
the real ones do, it adds up gradients until `optim_step`, and has only what was saved when its process ends. Each state
knows the rows that it was trained on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tinker import AdamParams, Datum, ModelInput, SamplingParams
from torch import Tensor

VOCABULARY = 12


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class Client:
    """A training client. die: name of a call, and at which of them the process is killed, before it does anything."""

    def __init__(self, folder: Path, die: tuple[str, int] = ("", 0)) -> None:
        self.folder, self.die = folder, die
        self.calls: list[str] = []
        self.table = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.table], lr=0.1)
        self.rows: list[list[int]] = []
        self.pending: list[list[int]] = []
        self.data: list[Datum] = []

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[Any]:
        self._note("forward_backward")
        assert loss_fn == "importance_sampling"
        total = 0.0
        for datum in data:
            inputs = {name: each.to_torch() for name, each in datum.loss_fn_inputs.items()}
            tokens = datum.model_input.to_ints()
            ratio = (self._log_probs(tokens, inputs["target_tokens"]) - inputs["logprobs"]).exp()
            loss = -(ratio * inputs["advantages"]).sum()
            loss.backward()
            total += float(loss.detach())
            self.pending.append([*tokens, int(inputs["target_tokens"][-1])])
        self.data += data
        return done(SimpleNamespace(metrics={"loss:sum": total}))

    def optim_step(self, adam: AdamParams) -> Future[Any]:
        self._note("optim_step")
        self.optimizer.param_groups[0]["lr"] = adam.learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rows += self.pending
        self.pending = []
        return done(SimpleNamespace(metrics={}))

    def save_state(self, name: str, ttl_seconds: int | None = None, overwrite: bool = False) -> Future[Any]:
        self._note("save_state")
        assert not self.pending
        state = {
            "table": self.table.detach(),
            "optimizer": self.optimizer.state_dict(),
            "rows": self.rows,
        }
        return done(self._write(f"{name}-state", state))

    def load_state_with_optimizer(self, path: str) -> Future[Any]:
        self._note("load_state")
        state = torch.load(self.folder / path.removeprefix("tinker://"), weights_only=True)
        self.table.data.copy_(state["table"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rows = state["rows"]
        return done(None)

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Future[Any]:
        self._note("save_weights_for_sampler")
        return done(self._write(name, {"table": self.table.detach()}))

    def _log_probs(self, tokens: Sequence[int], targets: Tensor) -> Tensor:
        return torch.log_softmax(self.table[list(tokens)], -1).gather(1, targets[:, None])[:, 0]

    def _write(self, name: str, state: dict[str, Any]) -> Any:
        file = self.folder / f"{name}-{os.getpid()}"
        torch.save(state, file)
        return SimpleNamespace(path=f"tinker://{file.name}")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.die == (call, self.calls.count(call)):
            os.kill(os.getpid(), signal.SIGKILL)


class Service:
    """Makes sampling clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create_sampling_client(self, model_path: str) -> Any:
        table = torch.load(self.folder / model_path.removeprefix("tinker://"))["table"]
        return Sampler(table)


class Sampler:
    def __init__(self, table: Tensor) -> None:
        self.table = table

    async def sample_async(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> Any:
        (last,), tokens, logs = prompt.to_ints()[-1:], [], []
        for _ in range(sampling_params.max_tokens or 1):
            distribution = torch.log_softmax(self.table[last] / sampling_params.temperature, -1)
            last = int(torch.multinomial(distribution.exp(), 1))
            tokens.append(last)
            logs.append(float(distribution[last]))
        made = SimpleNamespace(stop_reason="length", tokens=tokens, logprobs=logs)
        return SimpleNamespace(sequences=[made] * num_samples)
