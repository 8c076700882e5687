"""Weights of a model with adapters under the names of the model without: what engines and producers load.

While `merged(model)` holds, the adapters are in the weights of the model; afterwards these are what they were, bit for
bit: taking an adapter out again by subtraction would leave its rounding in them, more with each version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from . import refuse


def has_adapters(model: Any) -> bool:
    """Whether it is a PeftModel."""
    return hasattr(model, "peft_config") and hasattr(model, "base_model")


def check_mergeable(model: Any) -> None:
    """Raise SettingError for adapters that are no change of weights, such as prompts."""
    refuse(
        has_adapters(model) and not hasattr(model.base_model, "merge_adapter"),
        "weights is a folder: this kind of adapter cannot be merged into the model's weights; give a function that "
        "publishes them",
    )


@contextmanager
def merged(model: Any) -> Iterator[None]:
    """The adapters of a PeftModel are in its weights meanwhile; nothing happens to any other model."""
    if not has_adapters(model):
        yield
        return
    before = {
        name: weight.detach().clone() for name, weight in model.named_parameters() if ".base_layer." in name
    }
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in before:
                    weight.copy_(before[name])


def under_base_names(model: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tensors of a merged PeftModel without its adapters, as the model beneath names them."""
    if not has_adapters(model):
        return tensors
    prefix = getattr(model.base_model, "prefix", "lora_")
    named = {}
    for name, tensor in tensors.items():
        if prefix in name or ".original_module." in name:
            continue
        short = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        for adapter in model.peft_config:
            short = short.replace(f".modules_to_save.{adapter}.", ".")
        named[short] = tensor
    return named
