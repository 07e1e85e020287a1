"""Registers `strategy="spmdzero"` with Lightning, which has no entry points for strategies."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators import XLAAccelerator
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import deepspeed as lightnings_converter

from spmdzero.formats import format_of, fp32_weights, locate, open_state
from spmdzero.integrations._lightning_fabric import SpmdZeroFabricStrategy
from spmdzero.integrations._lightning_strategy import SpmdZeroStrategy
from spmdzero.integrations._replaced import in_place_of
from spmdzero.step._optimizer import ZeroOptimizer


def count_no_tpus() -> None:
    """Makes Lightning find no TPUs of its own: its one device is the CPU.

    It counts TPUs with torch_xla if that is installed, whatever accelerator is chosen, and a
    process that has imported torch_xla can't use the JAX backend any more.
    """

    @in_place_of(XLAAccelerator, "auto_device_count")
    def auto_device_count(*_: Any) -> int:
        return 0


def name_rates_by_the_scripts_optimizer() -> None:
    """Has `LearningRateMonitor` log `lr-SGD` for a script's or a config's SGD, as with DeepSpeed.

    It names a rate by the class of the optimizer, and takes one that a schedule has as seen.
    """

    @in_place_of(LearningRateMonitor, "_find_names_from_optimizers")
    def find(original: Any, self: Any, optimizers: list[Any], *args: Any, **kwargs: Any) -> Any:
        named = [(isinstance(o, ZeroOptimizer) and o.given) or o for o in optimizers]
        return original(self, named, *args, **kwargs)

    @in_place_of(LearningRateMonitor, "_check_duplicates_and_update_name")
    def update(original: Any, self: Any, optimizer: Any, name: str, *args: Any) -> Any:
        if isinstance(optimizer, ZeroOptimizer) and name == f"lr-{type(optimizer).__name__}":
            name = f"lr-{optimizer.configured}"
        return original(self, optimizer, name, *args)


def make_one_file_of_saved_folders() -> None:
    """Has Lightning's `convert_zero_checkpoint_to_fp32_state_dict` read spmdzero's folders, too.

    It looks for what Lightning has saved beside the weights in the files of DeepSpeed's ranks.
    """

    @in_place_of(lightnings_converter, "convert_zero_checkpoint_to_fp32_state_dict")
    def convert(original: Any, checkpoint_dir: Any, output_file: Any, tag: Any = None) -> Any:
        folder, found = locate(Path(checkpoint_dir), tag)
        if format_of(folder / found) != "native":
            return original(checkpoint_dir, output_file, tag)
        saved = dict(open_state(folder, found).host.client_state)
        saved["state_dict"] = fp32_weights(folder, found).state_dict()
        print(f"Saving fp32 state dict to {output_file}")
        torch.save(saved, output_file)
        return saved


def register_strategies() -> None:
    """Registers the strategies with the Trainer and with Fabric."""
    SpmdZeroStrategy.register_strategies(StrategyRegistry)
    SpmdZeroFabricStrategy.register_strategies(STRATEGY_REGISTRY)
