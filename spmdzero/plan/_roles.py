"""The ZeRO table: which role of a tensor is sharded at which stage."""

from dataclasses import replace
from enum import Enum

from spmdzero.plan._placement import Placement


class Role(str, Enum):
    """The part that a tensor plays for one parameter.

    PARAMETER is what the forward reads, ACCUMULATOR the gradient between micro-batches, GRADIENT
    the gradient at the step, MASTER the high-precision copy that the optimizer updates, MOMENT
    each of the optimizer's slots.
    """

    PARAMETER = "parameter"
    ACCUMULATOR = "accumulator"
    GRADIENT = "gradient"
    MASTER = "master"
    MOMENT = "moment"

    # Python 3.10 has no StrEnum: a role is written as its word.
    __str__ = str.__str__


def in_use(role: Role, at_rest: Placement) -> Placement:
    """The placement in which a step's program uses a tensor placed as `at_rest` between steps.

    Args:
        role: the tensor's role; the forward and the backward read a whole PARAMETER, the update
            computes with shards.
        at_rest: the tensor's placement between steps.
    """
    if role is Role.PARAMETER and at_rest.is_sharded:
        return Placement(kind="replicate", reason="gathered where the forward uses it")
    return at_rest


def parameter_at_rest(*, stage: int, shard: Placement, persistent: bool) -> Placement:
    """Where a parameter, trained or frozen, lives between steps.

    Args:
        stage: 0 to 3.
        shard: the placement of the states that the stage shards.
        persistent: whether stage 3 keeps the parameter whole because it is small.
    """
    if stage < 3:
        reason = f"stage {stage} keeps this whole on every device"
    elif shard.kind == "shard" and not persistent:
        # Where devices share the states in more parts than the parameter, each has of the states a
        # part of its part of the parameter.
        return shard if shard.over == "fsdp" else replace(shard, over="fsdp")
    elif shard.kind == "flat":
        # A module's parameter keeps its shape, and no dim of it splits evenly over the devices.
        reason = f"{shard.reason}; a parameter keeps its shape, and stays whole"
    else:
        reason = "within stage3_param_persistence_threshold" if persistent else shard.reason
    return Placement(kind="replicate", reason=reason)


def placements_at_stage(
    *, stage: int, shard: Placement, partial: bool, persistent: bool = False
) -> dict[Role, Placement]:
    """The placement of every role of a trainable parameter (ZeRO, arXiv 1910.02054, section 5).

    Args:
        stage: 0 to 3.
        shard: the placement of the states that the stage shards.
        partial: whether a gradient leaves the backward as each device's own summand; False if the
            backward hands over a gradient that is already reduced.
        persistent: as in `parameter_at_rest`.
    """
    whole = Placement(kind="replicate", reason=f"stage {stage} keeps this whole on every device")
    state = whole if stage == 0 else shard
    if stage >= 2:
        accumulator = state
    elif partial:
        accumulator = Placement(
            kind="partial", reason="each device sums its own micro-batches, reduced once a step"
        )
    else:
        accumulator = replace(
            state, reason=f"global forward: every micro-batch is reduced at once; {state.reason}"
        )
    return {
        Role.PARAMETER: parameter_at_rest(stage=stage, shard=shard, persistent=persistent),
        Role.ACCUMULATOR: accumulator,
        Role.GRADIENT: state,
        Role.MASTER: state,
        Role.MOMENT: state,
    }
