"""Medians of runs that take turns, so that whatever else the machine does meets all ways alike."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from streamadv.errors import StreamadvError

from .cases import Case, Peer, Results, Way, cases, token_cases
from .lines import GROUP_SIZE
from .machine import describe_processor
from .workload import Workload, make_workload

#: What is quicker is run several times in a row, so that a reading lasts this long.
SHORTEST_MS: Final = 5.0
MOST_IN_A_ROW: Final = 100

#: Rows on which equality is checked: of full length, few enough for the loops to be quick.
CHECKED_SEQUENCES: Final = 64
RELATIVE: Final = 1e-3  # the peers sum in float32; whitening and long sums lose digits
ABSOLUTE: Final = 1e-4


class DisagreementError(StreamadvError):
    """Two ways that are to be compared give different numbers."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians in milliseconds; None where the peer has no such thing."""

    name: str
    milliseconds: float
    bytes: int  # of columns read and results written, each counted once
    copy_milliseconds: float  # a copy of so many bytes
    padded_milliseconds: float | None
    verl_milliseconds: float | None
    roll_milliseconds: float | None
    synchronisations: int | None = None  # times the host waited for the device; None on a CPU

    @property
    def ratio_to_copy(self) -> float:
        return self.milliseconds / self.copy_milliseconds

    @property
    def bandwidth_share(self) -> float:
        """Of a copy, which reads and writes what is touched here once."""
        return self.copy_milliseconds / (2 * self.milliseconds)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "ratio_to_copy": self.ratio_to_copy,
            "bandwidth_share": self.bandwidth_share,
            "ratio_to_verl": self._speedup(self.verl_milliseconds),
            "ratio_to_roll": self._speedup(self.roll_milliseconds),
        }

    def _speedup(self, other: float | None) -> float | None:
        return None if other is None else other / self.milliseconds


def measure_all(sequences: int, tokens: int, repeat: int, device: str) -> Iterator[Measurement]:
    """Check every case, then measure it; one at a time, as they are done."""
    check_all(min(sequences, CHECKED_SEQUENCES), tokens, device)
    workload = make_workload(sequences, tokens, device=device)
    for case in cases():
        yield measure(case, workload, repeat)


def measure_large(num_tokens: int, tokens: int, repeat: int, device: str) -> Iterator[Measurement]:
    """The token-level cases on about `num_tokens` tokens in ragged rows of up to `tokens`, without the peers."""
    mean_length = (tokens // 8 + tokens) // 2
    sequences = math.ceil(num_tokens / mean_length / GROUP_SIZE) * GROUP_SIZE
    workload = make_workload(sequences, tokens, device=device, padded=False)
    for case in token_cases():
        yield measure(case.alone(), workload, repeat)


def check_all(sequences: int, tokens: int, device: str = "cpu") -> None:
    """Raises DisagreementError if any two ways of a case differ, on trainable tokens or steps."""
    several = make_workload(sequences, tokens, device=device)
    single = make_workload(sequences, tokens, turns=1, device=device)
    for case in cases():
        for name, way in case.peers():
            check(case, name, way, single if name in case.one_turn else several)


def check(case: Case, name: Peer, way: Way, workload: Workload) -> None:
    """Raises DisagreementError unless `way` gives what `case.run` gives."""
    for number, (ours, theirs) in enumerate(zip(case.run(workload), way(workload), strict=False)):
        expected, actual = _alike(case, workload, ours, theirs)
        close = torch.isclose(expected, actual, rtol=RELATIVE, atol=ABSOLUTE)
        if not bool(close.all()):
            worst = (expected - actual).abs().max().item()
            raise DisagreementError(
                f"{case.name}: result {number} of {name} differs by {worst:g} at worst in "
                f"{int((~close).sum())} of {len(close)} places"
            )


def _alike(case: Case, workload: Workload, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Both results where they count, in one order."""
    if case.level == "step":
        return ours[workload.step_order].cpu(), theirs.cpu()
    in_response = workload.padded["response_mask"][workload.row_order] != 0
    trained = workload.batch.column("response_mask") != 0
    return ours[trained], theirs[workload.row_order][in_response]


def measure(case: Case, workload: Workload, repeat: int) -> Measurement:
    """Medians over `repeat` rounds in which all ways take turns, after one unmeasured round."""
    results = case.run(workload)
    touched = [workload.batch.column(name) for name in case.reads] + list(results)
    if case.level == "step":
        touched.append(workload.batch.steps.rewards)
    copies = [torch.empty_like(tensor) for tensor in touched]

    def copy(_: Workload) -> Results:
        for target, source in zip(copies, touched, strict=True):
            target.copy_(source)
        return copies

    ways: dict[str, Way] = {"own": case.run, "copy": copy, **dict(case.peers())}
    on_device = workload.batch.device.type == "cuda"
    clock = _device_clock if on_device else _host_clock
    for way in ways.values():  # compiles, and fetches its memory
        way(workload)
    in_a_row = {
        name: max(1, min(MOST_IN_A_ROW, int(SHORTEST_MS / max(clock(way, workload, 1), 1e-3))))
        for name, way in ways.items()
    }
    rounds = [
        {name: clock(way, workload, in_a_row[name]) for name, way in ways.items()} for _ in range(repeat)
    ]
    median = {name: statistics.median(times[name] for times in rounds) for name in ways}
    return Measurement(
        name=case.name,
        milliseconds=median["own"],
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in touched),
        copy_milliseconds=median["copy"],
        padded_milliseconds=median.get("padded"),
        verl_milliseconds=median.get("verl"),
        roll_milliseconds=median.get("roll"),
        synchronisations=_synchronisations(case.run, workload) if on_device else None,
    )


def _host_clock(way: Way, workload: Workload, times: int) -> float:
    way(workload)  # the way before has left its own columns in the caches
    begin = time.perf_counter_ns()
    for _ in range(times):
        way(workload)
    return (time.perf_counter_ns() - begin) / 1e6 / times


def _device_clock(way: Way, workload: Workload, times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        way(workload)
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / times


def _synchronisations(way: Way, workload: Workload) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            way(workload)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def describe_machine(device: str) -> dict[str, Any]:
    """The machine, the device, and what torch computes with."""
    return {
        **describe_processor(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device != "cpu" else "cpu",
        "torch": torch.__version__,
    }
