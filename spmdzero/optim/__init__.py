"""Update rules over shards, and learning rate schedules. Nothing here knows about devices."""

from spmdzero.optim._adagrad import Adagrad
from spmdzero.optim._adam import Adam
from spmdzero.optim._bitsandbytes import kept_in_fp32
from spmdzero.optim._eight_bits import (
    decoded,
    encoded,
    is_signed,
    recoded,
    values_of_codes,
    zero_code,
)
from spmdzero.optim._elementwise import TorchElementwise
from spmdzero.optim._lamb import Lamb
from spmdzero.optim._lion import Lion
from spmdzero.optim._muon import Muon, muon_groups
from spmdzero.optim._named import (
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
)
from spmdzero.optim._rule import LocalTensor, Slot, Terms, UpdateRule
from spmdzero.optim._rule_factory import (
    DEEPSPEED_OPTIMIZERS,
    is_tested,
    rule_from_config,
    rules_from_torch,
)
from spmdzero.optim._schedule import DeepSpeedSchedule
from spmdzero.optim._schedule_factory import schedule_from_config
from spmdzero.optim._schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from spmdzero.optim._sgd import SGD

__all__ = [
    "DEEPSPEED_OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "DeepSpeedSchedule",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "LRRangeTest",
    "Lamb",
    "Lion",
    "LocalTensor",
    "Muon",
    "OneCycle",
    "Slot",
    "Terms",
    "TorchElementwise",
    "UpdateRule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "decoded",
    "encoded",
    "is_signed",
    "is_tested",
    "kept_in_fp32",
    "muon_groups",
    "recoded",
    "rule_from_config",
    "rules_from_torch",
    "schedule_from_config",
    "values_of_codes",
    "zero_code",
]
