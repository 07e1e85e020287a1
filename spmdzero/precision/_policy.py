"""The dtypes of one training run."""

import dataclasses
from collections.abc import Mapping

import torch

from spmdzero.config import SpmdZeroConfig

_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_named(name: str) -> torch.dtype:
    """The dtype with DeepSpeed's name (``"fp32"``, ``"bf16"``) or torch's (``"float32"``)."""
    return _NAMES[name] if name in _NAMES else getattr(torch, name)


def name_of(dtype: torch.dtype) -> str:
    """DeepSpeed's name of a dtype (``"fp32"``), or torch's where it has none (``"float64"``)."""
    names = {known: name for name, known in _NAMES.items()}
    return names.get(dtype) or str(dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """Dtypes by role, by DeepSpeed's rules (runtime/engine.py, `get_data_types`).

    Attributes:
        parameter: of parameters, forward and backward. Buffers keep their own.
        accumulate: of gradients between and after micro-batches.
        communicate: of the gradient reduction.
        master: whether parameters have fp32 master weights beside them.
        moment: of the optimizer's states, but for those in `slots`.
        slots: of the optimizer's states that have a dtype of their own, by their names.
        autocast: the dtype of `torch.autocast`, None without ``torch_autocast``.
        skip_nonfinite: whether a step whose gradient norm is not finite leaves the weights alone.
    """

    parameter: torch.dtype
    accumulate: torch.dtype
    communicate: torch.dtype
    master: bool
    moment: torch.dtype
    slots: Mapping[str, torch.dtype]
    autocast: torch.dtype | None
    skip_nonfinite: bool

    @classmethod
    def from_config(cls, config: SpmdZeroConfig) -> "PrecisionPolicy":
        """The policy for the config's dtype keys.

        The keys are `fp16`, `bf16`, `torch_autocast`, `data_types`, `communication_data_type`,
        `seq_parallel_communication_data_type` and `spmd.moments`.
        """
        parameter = torch.float32
        if config.fp16.enabled:
            parameter = torch.float16
        elif config.bf16.enabled:
            parameter = torch.bfloat16
        accumulate = config.data_types.grad_accum_dtype
        communicate = config.reduction_data_type
        # DeepSpeed's BF16_Optimizer and ZeRO check the norm in every dtype; only bf16 can opt out,
        # and stage 0 in fp32 has neither (runtime/zero/stage_1_and_2.py, `step`).
        checked = config.bf16.check_grad_overflow if config.bf16.enabled else True
        sharded = config.zero_optimization.stage > 0
        autocast = config.torch_autocast
        low = config.bf16.enabled and config.bf16.bf16_master_weights_and_grads
        return cls(
            parameter=parameter,
            accumulate=dtype_named(accumulate) if accumulate else parameter,
            communicate=dtype_named(communicate) if communicate else parameter,
            master=parameter != torch.float32 and not low,
            moment=torch.bfloat16 if low and config.bf16.bf16_optimizer_states else torch.float32,
            slots={slot: dtype_named(name) for slot, name in config.spmd.moments.items()},
            autocast=dtype_named(autocast.dtype or "bf16") if autocast.enabled else None,
            skip_nonfinite=checked and (sharded or parameter != torch.float32),
        )
