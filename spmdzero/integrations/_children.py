"""Child Pythons of a process in which spmdzero is deepspeed, and the launchers that start them."""

import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdzero._after_import import after_import
from spmdzero.integrations._replaced import in_place_of

logger = logging.getLogger("spmdzero")
_FOLDER = str(Path(__file__).parent / "in_children")
_PATH = "PYTHONPATH"
EXPLAINED = "SPMDZERO_EXPLAIN"
"""Names, in the environment, the folder of a run whose first step is explained."""


def know_deepspeed() -> None:
    """Has Pythons that this process starts from now on know spmdzero by the name deepspeed."""
    paths = os.environ.get(_PATH, "").split(os.pathsep)
    if _FOLDER not in paths:
        os.environ[_PATH] = os.pathsep.join([_FOLDER, *filter(None, paths)])


def start_one_a_host() -> None:
    """Has torch's launcher, which accelerate's uses too, start one process on each host."""
    after_import("torch.distributed.run", _start_one)
    after_import("torch.distributed.launcher.api", _start_one_of_its_config)


def _start_one(launcher: ModuleType) -> None:
    @in_place_of(launcher, "config_from_args")
    def config_from_args(original: Any, args: Any) -> Any:
        if str(args.nproc_per_node) != "1":
            _say_one(args.nproc_per_node)
            args.nproc_per_node = "1"
        return original(args)


def _start_one_of_its_config(launcher: ModuleType) -> None:
    # `python -m torch.distributed.run` runs the launcher under another name, without its import.
    @in_place_of(launcher.LaunchConfig, "__post_init__")
    def check(original: Any, self: Any) -> None:
        if self.nproc_per_node != 1:
            _say_one(self.nproc_per_node)
            self.nproc_per_node = 1
        original(self)


def _say_one(asked: Any) -> None:
    logger.warning(
        "%s processes on each host were asked for (nproc_per_node, or num_processes of "
        "accelerate's config): one is started, which drives all devices of its host",
        asked,
    )
