"""Update rules over shards, and learning rate schedules. Nothing here knows about devices."""

from spmdzero.optim._adam import Adam
from spmdzero.optim._clip import clip_coefficient
from spmdzero.optim._named import FusedAdam, FusedLamb, FusedLion
from spmdzero.optim._rule import UpdateRule
from spmdzero.optim._rule_factory import rule_from_config, rule_from_torch
from spmdzero.optim._schedule_factory import Schedule, schedule_from_config
from spmdzero.optim._schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR
from spmdzero.optim._sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "Schedule",
    "UpdateRule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "clip_coefficient",
    "rule_from_config",
    "rule_from_torch",
    "schedule_from_config",
]
