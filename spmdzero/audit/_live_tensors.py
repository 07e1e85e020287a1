"""Findings in the live tensors: states that are held whole, and buffers that are not reused."""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from spmdzero.audit._report import Finding, first_of
from spmdzero.backend import arrays, current
from spmdzero.engine import Engine

# Below this size a shard saves less than its collective costs; the default of min_shard_elements.
_LARGE = 2048
# libtpu sums a vector's gradient whole: sharded states save little there, and cost a gather.
_LARGE_VECTOR = 65_536
_WITHOUT_SHARDING = (
    "the state was replaced by a tensor without a sharding",
    "write into the state with copy_, or save and load through the engine, which shards what it "
    "loads",
)


def replicated_states(engine: Engine) -> Iterator[Finding]:
    """Yields large masters, moments and accumulators that are whole on a device above stage 0."""
    if engine.plan.stage == 0:
        return
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in engine.named_tensors().items():
        slot, _, parameter = name.partition("/")
        if _is_state(engine, slot) and _is_large(engine, parameter) and _is_whole(tensor):
            by_parameter.setdefault(parameter, {})[slot] = tensor
    for parameter, states in by_parameter.items():
        size = sum(t.numel() * t.element_size() for t in states.values())
        shape, least = engine.plan[parameter].shape, engine.spmd_config.spmd.min_shard_elements
        cause, fix = _WITHOUT_SHARDING
        if math.prod(shape) < least:
            cause = (
                f'"spmd": {{"min_shard_elements": {least}}} replicates tensors of up to '
                f"{math.prod(shape):,} elements"
            )
            fix = "lower it"
        yield Finding(
            name="replicated-large-state",
            severity="error",
            subject=f"{', '.join(states)} of {parameter}",
            cause=cause,
            fix=fix,
            evidence=f"every device holds all of {list(shape)}: "
            f"{size:,} bytes instead of {math.ceil(size / engine.mesh.spec.shards):,}",
        )


def drifted_parameters(engine: Engine) -> Iterator[Finding]:
    """Yields parameters that are whole in the plan but only a part on a device."""
    for name, parameter in engine.module.named_parameters():
        planned = engine.plan.at_rest(f"parameter/{name}").is_sharded
        if not planned and not _is_whole(parameter):
            yield Finding(
                name="parameter-drift",
                severity="error",
                subject=name,
                cause="the parameter was given the sharding of what was written into it, as "
                f"{current().name} does when a sharded value is assigned to .data or copied into "
                "it; each forward now gathers it, as ZeRO-3 would",
                fix="write with spmdzero.utils.safe_set_full_fp32_param, or through "
                "model.load_state_dict; not with .data = or with tensors made of optimizer states",
                evidence=f"a device holds {list(arrays.local_shapes(parameter)[0])} of "
                f"{list(parameter.shape)}, {arrays.sharding_of(parameter)}",
            )


def states(engine: Engine) -> dict[str, torch.Tensor]:
    """Name -> tensor of each parameter and state."""
    return {
        name: tensor
        for name, tensor in engine.named_tensors().items()
        if name.partition("/")[0] == "parameter" or _is_state(engine, name.partition("/")[0])
    }


def missing_donation(
    replaced: Iterable[str], states: int, donated: Mapping[str, int], inputs: int
) -> Iterator[Finding]:
    """A finding about tensors whose old memory was still in use at the next launch.

    Args:
        replaced: names of the tensors, as in `engine.named_tensors()`.
        states: number of parameters and states of the engine.
        donated: kind of program -> number of inputs whose buffers it reuses, by the backend's
            metric, if this engine compiled it.
        inputs: number of inputs of the boundary's program.
    """
    names = set(replaced)
    if not names:
        return
    yield Finding(
        name="missing-donation",
        severity="warning",
        subject=first_of(names),
        cause="between two steps the tensor was replaced by another, so the program can't write "
        "its result into the buffer of its input: both exist at once",
        fix="update it in place, with copy_, mul_ or add_, instead of assigning a new tensor",
        evidence=f"{len(names)} of {states} parameters and states came back as new tensors"
        + (
            f"; the boundary program reuses {donated['boundary']} of its {inputs} inputs"
            if "boundary" in donated
            else ""
        ),
    )


def _is_state(engine: Engine, slot: str) -> bool:
    return slot in ("master", "accumulator") or engine.plan.is_slot(slot)


def _is_large(engine: Engine, parameter: str) -> bool:
    shape = engine.plan[parameter].shape
    return math.prod(shape) >= (_LARGE if len(shape) > 1 else _LARGE_VECTOR)


def _is_whole(tensor: torch.Tensor) -> bool:
    return arrays.local_shapes(tensor)[0] == tuple(tensor.shape)
