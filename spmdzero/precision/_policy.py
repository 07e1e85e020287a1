"""The dtypes of one training run."""

import dataclasses

import torch

from spmdzero.config import SpmdZeroConfig

_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def dtype_named(name: str) -> torch.dtype:
    """The dtype that DeepSpeed calls `name` (``"fp32"``, ``"bf16"``) or torch (``"float32"``)."""
    return _NAMES[name] if name in _NAMES else getattr(torch, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """Dtypes by role; DeepSpeed's rules (runtime/engine.py, `get_data_types`).

    Attributes:
        parameter: of parameters, forward and backward. Buffers keep their own.
        accumulate: of gradients between and after micro-batches.
        communicate: of the gradient reduction.
        master: whether parameters have fp32 master weights beside them.
        skip_nonfinite: whether a step whose gradient norm is not finite leaves the weights alone.
    """

    parameter: torch.dtype
    accumulate: torch.dtype
    communicate: torch.dtype
    master: bool
    skip_nonfinite: bool

    @classmethod
    def from_config(cls, config: SpmdZeroConfig) -> "PrecisionPolicy":
        """The policy that `bf16`, `data_types` and `communication_data_type` ask for."""
        parameter = torch.bfloat16 if config.bf16.enabled else torch.float32
        accumulate = config.data_types.grad_accum_dtype
        communicate = config.communication_data_type
        return cls(
            parameter=parameter,
            accumulate=dtype_named(accumulate) if accumulate else parameter,
            communicate=dtype_named(communicate) if communicate else parameter,
            master=parameter != torch.float32,
            skip_nonfinite=config.bf16.enabled and config.bf16.check_grad_overflow,
        )
