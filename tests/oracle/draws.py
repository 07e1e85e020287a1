"""Configs drawn at random, the same ones for the same seed."""

import dataclasses
import json
import random
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training run that both libraries do.

    Attributes:
        name: its number and what was drawn.
        config: DeepSpeed's JSON, without the micro-batch size.
        steps: optimizer steps.
        groups: two parameter groups, the second without weight decay and with its own lr.
        frozen: names of the parameters that are not trained.
    """

    name: str
    config: dict[str, Any]
    steps: int
    groups: bool
    frozen: list[str]


def _named(type_: str, **params: Any) -> dict[str, Any]:
    return {"type": type_, "params": params}


def _fp16(**rules: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **rules}}


_BETAS: dict[str, Any] = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8}
# Without Lion and Lamb, which DeepSpeed has not on the CPU.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": _named("AdamW", **_BETAS, weight_decay=0.1),
    "adamw_torch": _named("AdamW", lr=2e-3, torch_adam=True),
    "adam": _named("Adam", **_BETAS),
    "adam_l2": _named("Adam", **_BETAS, adam_w_mode=False, weight_decay=0.1),
    "adam_uncorrected": _named("Adam", **_BETAS, bias_correction=False),
    "sgd": _named("SGD", lr=0.05, momentum=0.9, weight_decay=0.01),
    "sgd_nesterov": _named("SGD", lr=0.05, momentum=0.8, nesterov=True),
    "adagrad": _named("Adagrad", lr=0.01, weight_decay=0.01),
    "muon": _named("Muon", lr=2e-3, momentum=0.95, weight_decay=0.1),
    "rmsprop": _named("RMSprop", lr=2e-3, momentum=0.5),
}
_LINEAR = {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear"}
_CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 4e-3, "cycle_first_step_size": 2}
_RANGE = {"lr_range_test_step_size": 2, "lr_range_test_step_rate": 2.0}
SCHEDULES: dict[str, dict[str, Any] | None] = {
    "constant": None,
    "warmup": _named("WarmupLR", warmup_min_lr=1e-4, warmup_max_lr=4e-3, warmup_num_steps=3),
    "decay": _named("WarmupDecayLR", warmup_max_lr=4e-3, **_LINEAR),
    "cosine": _named("WarmupCosineLR", total_num_steps=6, warmup_num_steps=2, warmup_min_ratio=0.2),
    "onecycle": _named("OneCycle", **_CYCLE, decay_step_size=1, decay_lr_rate=0.5),
    "range": _named("LRRangeTest", lr_range_test_min_lr=5e-4, **_RANGE),
}
_BF16: dict[str, Any] = {"bf16": {"enabled": True}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": _BF16,
    "bf16_acc32": {**_BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16_comm32": {**_BF16, "communication_data_type": "fp32"},
    # The first steps overflow: 2^19 times this model's gradients is beyond fp16.
    "fp16": _fp16(initial_scale_power=19, loss_scale_window=2, hysteresis=1),
    "fp16_slow": _fp16(
        initial_scale_power=18, loss_scale_window=3, hysteresis=2, consecutive_hysteresis=True
    ),
    "fp16_static": _fp16(loss_scale=256),
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
# At stage 2 DeepSpeed divides before the sum only without its reduce-scatter.
REDUCTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"gradient_allreduce_op": "sum"},
    "prescaled": {"prescale_gradients": True},
    "predivided": {"gradient_predivide_factor": 4.0},
}
CLIPS: dict[str, dict[str, Any]] = {
    "default": {},
    "0": {"gradient_clipping": 0.0},
    "0.3": {"gradient_clipping": 0.3},
    "100": {"gradient_clipping": 100.0},
}


def draw(count: int, *, seed: int) -> list[Case]:
    """`count` cases; each value of each option occurs about equally often among them."""
    rng = random.Random(seed)
    cases: list[Case] = []
    decks = {
        "precision": _Deck(list(PRECISIONS), rng),
        "optimizer": _Deck(list(OPTIMIZERS), rng),
        "schedule": _Deck(list(SCHEDULES), rng),
        "reduction": _Deck(list(REDUCTIONS), rng),
        "clip": _Deck(list(CLIPS), rng),
        "stage": _Deck([0, 1, 2], rng),
        "gas": _Deck([1, 2, 4], rng),
        "groups": _Deck([False, True], rng),
        "frozen": _Deck([[], [], ["embed.weight"], ["norm.bias", "up.weight"]], rng),
    }
    while len(cases) < count:
        drawn = {option: deck.take() for option, deck in decks.items()}
        if drawn["stage"] == 0 and drawn["precision"] != "fp32":
            # DeepSpeed's stage 0 is defective there; of fp16, see `fp16_without_zero`.
            drawn["stage"] = rng.choice([1, 2])
        if drawn["optimizer"] in ("adagrad", "muon"):
            # DeepSpeed's own ZeRO makes Adagrad's states and orthogonalises Muon's gradients. What
            # is not it (stage 0, and stage 1 with fp32 accumulation of bf16) fails, or clips first.
            drawn["stage"] = 2
        if drawn["optimizer"] == "adagrad":
            drawn["groups"] = False  # of the first group only
        cases.append(_case(len(cases), drawn))
    return cases


def fp16_without_zero() -> list[Case]:
    """fp16 at stage 0, of which DeepSpeed 0.19.8 needs the loss scaled by hand.

    With SGD without weight decay: the step that DeepSpeed runs while it makes the optimizer, with
    gradients of 0, leaves no trace in it.
    """
    drawn = {"optimizer": "sgd_nesterov", "stage": 0, "clip": "0.3", "groups": False, "frozen": []}
    rest = [
        {"precision": "fp16", "schedule": "warmup", "reduction": "mean", "gas": 2},
        {"precision": "fp16_slow", "schedule": "constant", "reduction": "prescaled", "gas": 1},
        {"precision": "fp16_static", "schedule": "constant", "reduction": "predivided", "gas": 2},
    ]
    return [_case(number, drawn | more) for number, more in enumerate(rest, start=100)]


def offloaded() -> list[Case]:
    """States on the host, which DeepSpeed updates there by DeepSpeedCPUAdam; stage 3 has all there.

    Two micro-batches a step, whose gradients DeepSpeed adds up on the host too.
    """
    drawn = {"optimizer": "adamw", "schedule": "decay", "reduction": "mean", "clip": "0.3"}
    drawn |= {"gas": 2, "groups": True, "frozen": []}
    there = {"device": "cpu", "pin_memory": True}
    cases = []
    for number, stage in enumerate((1, 2, 3) * 2, start=110):
        case = _case(
            number, drawn | {"stage": stage, "precision": "bf16" if number > 112 else "fp32"}
        )
        zero: dict[str, Any] = {"stage": stage, "offload_optimizer": there}
        if stage == 3:
            zero |= {"offload_param": there, "stage3_param_persistence_threshold": 0}
        config = case.config | {"zero_optimization": zero}
        cases.append(dataclasses.replace(case, name=f"{case.name}-offloaded", config=config))
    return cases


def to_json(cases: list[Case]) -> str:
    """What the worker reads."""
    return json.dumps([dataclasses.asdict(case) for case in cases])


class _Deck:
    """Hands out all values in a random order, then again in another one."""

    def __init__(self, values: list[Any], rng: random.Random) -> None:
        self._values, self._rng = values, rng
        self._left: list[Any] = []

    def take(self) -> Any:
        if not self._left:
            self._left = self._rng.sample(self._values, len(self._values))
        return self._left.pop()


def _case(number: int, drawn: dict[str, Any]) -> Case:
    config: dict[str, Any] = {
        "gradient_accumulation_steps": drawn["gas"],
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": drawn["stage"]},
        "zero_allow_untested_optimizer": True,
        "optimizer": OPTIMIZERS[drawn["optimizer"]],
    }
    schedule = SCHEDULES[drawn["schedule"]]
    config |= {"scheduler": schedule} if schedule else {}
    config |= PRECISIONS[drawn["precision"]] | REDUCTIONS[drawn["reduction"]]
    config |= CLIPS[drawn["clip"]]
    if drawn["reduction"] in ("prescaled", "predivided"):
        config["zero_optimization"] = {"stage": drawn["stage"], "reduce_scatter": False}
    words = [drawn[w] for w in ("precision", "optimizer", "schedule", "reduction")]
    words += [f"stage{drawn['stage']}", f"gas{drawn['gas']}", f"clip{drawn['clip']}"]
    words += ["groups"] if drawn["groups"] else []
    words += ["frozen"] if drawn["frozen"] else []
    return Case(
        name=f"{number:02d}-" + "-".join(words),
        config=config,
        steps=5,
        groups=drawn["groups"],
        frozen=drawn["frozen"],
    )
