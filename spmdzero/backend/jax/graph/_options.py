"""Options that the compiler receives with each program."""

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax

from spmdzero._logging import log_once
from spmdzero.backend.chips._chips import tpu_generation
from spmdzero.backend.chips._flag_sets import ALWAYS, flags_of, given_to_libtpu, no_effect_here


class Chosen:
    """The choice of the latest engine's config.

    Attributes:
        name: of the set of flags.
    """

    name = "none"


chosen = Chosen()

_WITHOUT = "xla_disable_hlo_passes"
_ON_CPU: dict[str, bool | str] = {
    # With it, matrix products were wrong on an AMD EPYC (family 25, model 1) with jaxlib 0.7.1:
    # gradients of a GPT of 10 M parameters, from a program's second run on. JAX turns it on by
    # default.
    "xla_cpu_use_xnnpack": False,
    # A newer XLA (jax 0.12) sums all gradients in one operation, for which every device holds all
    # of them whole until the last one is there. An older one has no such pass.
    _WITHOUT: "cpu-all-reduce-combiner",
}
# Widens sums of 16 bits, and ends the process where devices of a replica add such up for themselves
# (jaxlib 0.7.1: "Invalid binary instruction opcode copy").
_WIDENS_SUMS = "all-reduce-promotion"
# Otherwise the compiler leaves out roundings to 16 bits between operations: losses and gradients
# would have more bits than torch's, and what overflows in fp16 would not.
_ON_GPU: dict[str, bool | str] = {"xla_allow_excess_precision": False}


def flags_for(name: str, *, chip: str | None = None) -> Mapping[str, str]:
    """The flags of a set, see `flags_of`; ``"auto"`` takes those of this machine's chip.

    Raises:
        SpmdZeroUsageError: there is no such set.
    """
    if name == "auto" and chip is None and jax.default_backend() == "tpu":
        chip = tpu_generation()
    return flags_of(name, chip=chip)


def of_devices(mesh: Any = None) -> dict[str, Any] | None:
    """The options for the compiler of this process's devices, None if there are none.

    Args:
        mesh: JAX's, over which the program runs; None for one in which no device shares rows.
    """
    platform = jax.default_backend()
    if platform != "tpu" and chosen.name != "none":
        log_once(no_effect_here(chosen.name))
    options = dict({"tpu": of_tpu, "cpu": of_cpu, "gpu": _ON_GPU.copy}.get(platform, dict)())
    passes = options.get(_WITHOUT)
    if platform == "cpu" and passes and mesh is not None and "sequence" in mesh.axis_names:
        options[_WITHOUT] = f"{passes},{_WIDENS_SUMS}"
    return options or None


def of_tpu() -> dict[str, str]:
    """The options for the TPU's compiler where there is a TPU; the environment's flags win."""
    if jax.default_backend() != "tpu":
        return {}
    known = given_to_libtpu()
    wanted = {**ALWAYS, **flags_for(chosen.name)}
    return {name: value for name, value in wanted.items() if name not in known}


@functools.cache
def of_cpu() -> Mapping[str, bool | str]:
    """Options for the CPU with each program: XLA_FLAGS may be too late, and is inherited."""
    named = os.environ.get("XLA_FLAGS", "")
    options = {name: value for name, value in _ON_CPU.items() if name not in named}
    if _are_known(options):
        return options
    return {name: value for name, value in options.items() if _are_known({name: value})}


def _are_known(options: Mapping[str, bool | str]) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError:
        # A newer XLA lacks one of them.
        return False
    return True
