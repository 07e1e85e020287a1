"""Who takes part."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One peer with its options.

    Attributes:
        name: as the tables show it.
        peer: module under peers/.
        options: keyword arguments of its class `Peer`.
        ranks: whether it needs one process for each device.
        backend: spmdzero's, and that of its ledger which counts a peer's wire.
    """

    name: str
    peer: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    ranks: bool = False
    backend: str = "jax"


def ours(name: str, *, stage: int = 2, three_calls: bool = False, **spmd: Any) -> Candidate:
    """spmdzero under a stage and a section ``spmd``."""
    options = {"stage": stage, "spmd": spmd, "three_calls": three_calls}
    return Candidate(name=f"spmdzero {name}", peer="ours", options=options)


ZERO_2, ZERO_1 = ours("ZeRO-2"), ours("ZeRO-1", stage=1)
ZERO_3 = ours("ZeRO-3", stage=3)
THREE_CALLS = ours("ZeRO-2, three calls", three_calls=True)
TRACED = ours("ZeRO-2, traced", capture=False)
THREE_TRACED = ours("ZeRO-2, three calls, traced", three_calls=True, capture=False)
ANNOTATED = ours("ZeRO-2, annotated", reduction="annotated")
EXPLICIT = ours("ZeRO-2, explicit", reduction="explicit")
ALL_SHARDED = ours("ZeRO-2, min_shard_elements 1", min_shard_elements=1)
FEW_SHARDED = ours("ZeRO-2, min_shard_elements 16384", min_shard_elements=16384)
DEEPSPEED_2 = Candidate(
    name="DeepSpeed ZeRO-2", peer="deepspeed_zero", options={"stage": 2}, ranks=True
)
DEEPSPEED_1 = Candidate(
    name="DeepSpeed ZeRO-1", peer="deepspeed_zero", options={"stage": 1}, ranks=True
)
DEEPSPEED_3 = Candidate(
    name="DeepSpeed ZeRO-3", peer="deepspeed_zero", options={"stage": 3}, ranks=True
)
FSDP2 = Candidate(name="torch FSDP2, no reshard", peer="fsdp2", ranks=True)
FSDP2_RESHARD = Candidate(name="torch FSDP2", peer="fsdp2", options={"reshard": True}, ranks=True)
DDP = Candidate(name="torch DDP + ZeroRedundancyOptimizer", peer="ddp_zero", ranks=True)
FSDPV2 = Candidate(
    name="torch_xla FSDPv2",
    peer="torch_xla_spmd",
    options={"sharded": True},
    backend="torch_xla",
)
XLA_DDP = Candidate(
    name="torch_xla SPMD data parallel",
    peer="torch_xla_spmd",
    options={"sharded": False},
    backend="torch_xla",
)
JAX = Candidate(name="jax.jit ZeRO-2 by hand", peer="jax_zero")
JAX_3 = Candidate(name="jax.jit ZeRO-3 by hand", peer="jax_zero", options={"stage": 3})

STAGE_3 = (ZERO_3, DEEPSPEED_3, FSDP2_RESHARD, FSDPV2, JAX_3, ZERO_2)
ALL = (
    ZERO_2, THREE_CALLS, ZERO_1, DEEPSPEED_2, DEEPSPEED_1, FSDP2, DDP,
    FSDPV2, XLA_DDP, JAX,
)  # fmt: skip
FEWER = (ZERO_2, THREE_CALLS, DEEPSPEED_2, FSDP2, DDP, FSDPV2, JAX)
