"""Trainings that are the same whatever hosts they are spread over."""

from typing import Any

STEPS = 50
# A persistence threshold of 100,000 elements would keep all of this model whole.
ALL_SHARDS = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
_THERE = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
OFFLOADED = {"zero_optimization": ALL_SHARDS["zero_optimization"] | _THERE}
_GROUPS = {"zero_hpz_partition_size": 4}


def _case(
    stage: int = 2, *, dropout: float = 0.0, style: str = "", **config: Any
) -> dict[str, Any]:
    zero = {"zero_optimization": {"stage": stage}}
    return {"steps": STEPS, "dropout": dropout, "style": style, "config": zero | config}


CASES: dict[str, dict[str, Any]] = {
    "stage 0": _case(0),
    "stage 1": _case(1),
    "stage 2": _case(2),
    "three calls": _case(2, style="three calls") | {"first_looks": 9},
    "loader, stage 3": _case(style="loader", **ALL_SHARDS),
    "accumulation, stage 1": _case(1, gradient_accumulation_steps=3),
    "accumulation, stage 2": _case(2, gradient_accumulation_steps=3, dropout=0.25),
    "accumulation, stage 3": _case(gradient_accumulation_steps=3, dropout=0.25, **ALL_SHARDS),
    "bf16": _case(2, bf16={"enabled": True}),
    "fp16": _case(1, fp16={"enabled": True, "initial_scale_power": 8}),
    "dropout": _case(2, dropout=0.25),
    "explicit": _case(2, spmd={"reduction": "explicit"}),
    "stage 3": _case(dropout=0.25, **ALL_SHARDS),
    "stage 3, three calls": _case(
        style="three calls", gradient_accumulation_steps=2, bf16={"enabled": True}, **ALL_SHARDS
    ),
    "stage 3, bf16": _case(bf16={"enabled": True}, **ALL_SHARDS),
    # Enough steps for captured ones; where programs can, each host has its devices' shards.
    "offloaded, stage 3": _case(**OFFLOADED) | {"steps": 12},
    "stage 3, two axes": _case(spmd={"mesh": {"data": 2, "fsdp": 4}}, **ALL_SHARDS),
    "stage 3, groups": _case(zero_optimization=ALL_SHARDS["zero_optimization"] | _GROUPS),
    "two axes": _case(2, spmd={"mesh": {"data": 2, "fsdp": 4}}, dropout=0.25),
}
