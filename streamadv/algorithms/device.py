"""The device that a process computes on."""

from __future__ import annotations

from typing import Literal

from ..errors import SettingError
from ..extras import torch

Device = Literal["auto", "cpu", "cuda"]


def choose_device(device: Device) -> torch.device:
    """The torch device of a setting; `auto` is cuda if the machine has one.

    Raises SettingError for another word, and for cuda on a machine without it.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise SettingError(f"device is {device!r}, needs 'auto', 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingError("device is 'cuda', this machine has none: use 'auto' or 'cpu'")
    return torch.device(device)
