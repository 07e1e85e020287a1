"""A model whose linear layers bitsandbytes has quantized, as QLoRA's frozen base."""

import importlib
from typing import Any

import torch
from torch import nn

from spmdzero.errors import SpmdZeroUsageError

_LIBRARY = "bitsandbytes"
# peft's layers around such a layer -> those around a plain one, in the same package.
_AROUND = {"Linear4bit": "Linear", "Linear8bitLt": "Linear"}
_TOLD = ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized")


def take_values(model: nn.Module) -> int:
    """Makes quantized linear layers plain ones, in place, with the values that they compute with.

    They are frozen. Layers of peft around them, and what transformers notes on a model, follow.
    The library is on the host's CPU already, as it made the weights.

    Returns the number of layers, 0 of a model without any, which stays as it is.

    Raises:
        SpmdZeroUsageError: a parameter of bitsandbytes in another module than a linear layer, or
            one that isn't quantized yet.
    """
    count = 0
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not _is_of_library(parameter):
                continue
            at = f"{prefix}.{name}".lstrip(".")
            if name != "weight" or not isinstance(module, nn.Linear):
                raise SpmdZeroUsageError(
                    f"{at} is a {type(parameter).__name__} of bitsandbytes in a "
                    f"{type(module).__name__}: linear layers can be taken over, with the values "
                    "of their 4 or 8 bits, and nothing else. Load the model without it "
                    "(load_in_4bit, load_in_8bit, a BitsAndBytesConfig)"
                )
            values = _values(at, parameter, module)
            module.__class__ = nn.Linear
            module.weight = nn.Parameter(values, requires_grad=False)
            count += 1
    for module in model.modules() if count else ():
        _follow(module)
    return count


def _is_of_library(parameter: torch.Tensor) -> bool:
    return type(parameter).__module__.partition(".")[0] == _LIBRARY


@torch.no_grad()
def _values(name: str, parameter: Any, module: Any) -> torch.Tensor:
    state, scales = (getattr(parameter, key, None) for key in ("quant_state", "SCB"))
    if scales is None:
        # The first forward of a layer of 8 bits moves its scales there.
        scales = getattr(getattr(module, "state", None), "SCB", None)
    if state is not None:
        functional = importlib.import_module(f"{_LIBRARY}.functional")
        return functional.dequantize_4bit(parameter.data, state)
    if scales is not None and parameter.data.dtype == torch.int8:
        # Of each row the largest is 127 (bitsandbytes, `int8_vectorwise_dequant`).
        return parameter.data.float() * (scales.float().unsqueeze(-1) / 127)
    raise SpmdZeroUsageError(
        f"{name} is a {type(parameter).__name__} of bitsandbytes that isn't quantized: it has no "
        "scales. Load the weights by from_pretrained(quantization_config=...)"
    )


def _follow(module: nn.Module) -> None:
    cls = type(module)
    if cls.__module__.startswith("peft.tuners.") and cls.__module__.endswith(".bnb"):
        plain = importlib.import_module(cls.__module__.removesuffix("bnb") + "layer")
        kind = getattr(plain, _AROUND.get(cls.__name__, ""), None)
        if kind is not None:
            module.__class__ = kind
            module.is_target_conv_1d_layer = False  # pyrefly: ignore[bad-argument-type]
    for name in _TOLD:
        if vars(module).get(name):
            setattr(module, name, False)
    vars(module).pop("hf_quantizer", None)
    vars(module).pop("quantization_method", None)
    config = vars(module).get("config")
    if hasattr(config, "quantization_config"):
        del config.quantization_config
