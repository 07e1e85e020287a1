"""The runs whose checkpoints are recorded, and the model that they train."""

from collections.abc import Callable
from typing import Any

import torch

from tests.oracle.model import ROWS, Model, make_batch, make_model

SAVED_AFTER, RESUMED_FOR = 4, 3
CLIENT_STATE = {"epoch": 3, "note": "recorded"}
_ADAM = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
_TORCH_ADAM = {"type": "AdamW", "params": _ADAM | {"torch_adam": True}}
_FUSED_ADAM = {"type": "AdamW", "params": _ADAM}
_BF16 = {"bf16": {"enabled": True}}
# Two steps overflow before the checkpoint: they are skipped, and the scale is halved.
_FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 3}}
# All steps before the checkpoint overflow, so there is no optimizer state yet.
_FP16_SKIPPING = {"fp16": {"enabled": True, "initial_scale_power": 21}}
Case = dict[str, Any]


def _case(stage: int, ranks: int, *, optimizer: Any = _TORCH_ADAM, zero: Any = None, **more: Any):
    config = {
        "gradient_clipping": 1.0,
        "optimizer": optimizer,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 4e-3, "warmup_num_steps": 6},
        },
        "zero_optimization": {"stage": stage, **(zero or {})},
        "steps_per_print": 10**9,
    }
    return {"ranks": ranks, "config": config | more, "frozen": [], "tied": False, "tp": 1}


def _autotp(*, fused: bool) -> dict[str, Any]:
    """DeepSpeed's section for `tests.oracle.model.Model`, whose hidden layer may be two in one."""
    up = {"shape": [2, -1], "partition_dim": 0} if fused else {}
    down = {"shape": [-1, 2], "partition_dim": 1} if fused else {}
    specs = [
        {"patterns": [r"up\.weight$"], "partition_type": "column", **up},
        {"patterns": [r"down\.weight$"], "partition_type": "row", **down},
        {"patterns": [r"head\.weight$"], "partition_type": "column", "gather_output": True},
    ]
    return {"autotp_size": 2, "partition_config": {"layer_specs": specs}}


CASES: dict[str, Case] = {
    "z0_w2_fp32": _case(0, 2),
    "z0_w2_bf16": _case(0, 2, **_BF16),
    "z0_w2_bf16_fused": _case(0, 2, optimizer=_FUSED_ADAM, **_BF16),
    "z1_w2_fp32_tied": _case(1, 2, optimizer=_FUSED_ADAM) | {"tied": True},
    "z1_w2_bf16_gacc32": _case(1, 2, **_BF16, data_types={"grad_accum_dtype": "fp32"}),
    "z2_w4_bf16_frozen": _case(2, 4, **_BF16) | {"frozen": ["place", "up.bias"]},
    "z2_w2_fp16": _case(2, 2, **_FP16),
    "z1_w2_fp16_skipping": _case(1, 2, **_FP16_SKIPPING),
    "z2_w2_fp32_aligned": _case(
        2, 2, zero={"parameter_alignment": True, "round_robin_gradients": True}
    ),
    "z1_w2_fp32_elastic": _case(1, 2, zero={"elastic_checkpoint": True}),
    "z2_w2_fp32_sgd": _case(
        2,
        2,
        optimizer={"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        zero_allow_untested_optimizer=True,
    ),
    # Several sub-groups to a param group, and parameters that no number of ranks divides.
    "z3_w2_fp32": _case(
        3, 2, zero={"stage3_param_persistence_threshold": 0, "sub_group_size": 1200}
    ),
    "z3_w2_fp32_tied": _case(3, 2, optimizer=_FUSED_ADAM) | {"tied": True},
    "z3_w4_bf16_frozen": _case(3, 4, zero={"stage3_param_persistence_threshold": 50}, **_BF16)
    | {"frozen": ["place", "up.bias"]},
    "z3_w2_fp16": _case(3, 2, **_FP16),
    "z2_w4_fp32_tp2": _case(2, 4, tensor_parallel=_autotp(fused=True))
    | {"frozen": ["place"], "tp": 2},
}
# Trained beside live DeepSpeed alone, and not recorded.
LIVE: dict[str, Case] = {
    "z1_w2_bf16_tp2": _case(1, 2, tensor_parallel=_autotp(fused=False), **_BF16) | {"tp": 2},
}


def model_of(case: Case) -> tuple[Model, list[dict[str, Any]]]:
    """The case's model with its initial weights, and its param groups."""
    model = make_model()
    # In the state dict, in no optimizer.
    model.register_buffer("seen", torch.arange(3.0))
    if case["tied"]:
        model.head.weight = model.embed.weight
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case["frozen"])
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def config_of(
    case: Case, *, ranks: int, stage: int | None = None, autotp: bool = True
) -> dict[str, Any]:
    """The case's JSON for so many ranks or devices, which share the same rows.

    Args:
        case: of `CASES`.
        ranks: number of them.
        stage: a ZeRO stage other than the case's.
        autotp: whether ``case["tp"]`` of them share each row's work.
    """
    replicas = ranks // case["tp"] if autotp else ranks
    config = case["config"] | {"train_micro_batch_size_per_gpu": ROWS // replicas}
    if not autotp:
        config.pop("tensor_parallel", None)
    if stage is not None:
        config["zero_optimization"] = config["zero_optimization"] | {"stage": stage}
    return config


def run_order(engine: Any, order: dict[str, Any], rows: slice, save: Callable[[], None]) -> Any:
    """Trains the order's steps; what a script sees of it, the losses as tensors."""
    path, client_state = engine.load_checkpoint(order["load"]) if order["load"] else (None, {})
    losses = []
    for step in range(order["start"], order["start"] + order["steps"]):
        if order["save"] and step == order["save_at"]:
            save()
        loss = engine(*(tensor[rows] for tensor in make_batch(step, 0)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return {
        "losses": losses,
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "lr": engine.get_lr(),
        "client_state": sorted(client_state or {}),
        "path": path,
    }
