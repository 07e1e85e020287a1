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


_BETAS = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW", "params": _BETAS | {"weight_decay": 0.1}},
    "adamw_torch": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
    "adam": {"type": "Adam", "params": _BETAS},
    "adam_l2": {"type": "Adam", "params": _BETAS | {"adam_w_mode": False, "weight_decay": 0.1}},
    "adam_uncorrected": {"type": "Adam", "params": _BETAS | {"bias_correction": False}},
    "sgd": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}},
    "sgd_nesterov": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.8, "nesterov": True}},
}
SCHEDULES: dict[str, dict[str, Any] | None] = {
    "constant": None,
    "warmup": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 4e-3, "warmup_num_steps": 3},
    },
    "decay": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_max_lr": 4e-3,
            "warmup_num_steps": 2,
            "total_num_steps": 6,
            "warmup_type": "linear",
        },
    },
    "cosine": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_min_ratio": 0.2},
    },
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16_acc32": {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}
REDUCTIONS: dict[str, dict[str, Any]] = {"default": {}}
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
            drawn["stage"] = rng.choice([1, 2])  # DeepSpeed's stage 0 is defective there
        cases.append(_case(len(cases), drawn))
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
