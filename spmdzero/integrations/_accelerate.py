"""Tells accelerate about hosts before it counts processes and makes an engine.

accelerate finds other processes by itself only with a GPU, or if it is asked for the CPU, which
turns DeepSpeed off (`accelerate/state.py`, `PartialState`). So each of several hosts would count
itself alone, and read all rows.
"""

import inspect
import os
import sys
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from spmdzero._after_import import after_import
from spmdzero._logging import log_once
from spmdzero.backend import choose
from spmdzero.backend.hosts import processes
from spmdzero.config import backend_of, load_config, with_value
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._replaced import in_place_of
from spmdzero.integrations._rows_of_devices import shorten_dummies

ASKED = "ACCELERATE_USE_DEEPSPEED"
_PARALLEL = "tensor_parallel"
_PRECISION = "ACCELERATE_MIXED_PRECISION"
_OF_FP8 = ("FP8RecipeKwargs", "AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs")


def follow_imports() -> None:
    """Makes accelerate count a process for each host, and leave the devices' mesh to the engine."""
    after_import("accelerate.state", _count_hosts)
    after_import("accelerate.state", _join_hosts)
    after_import("accelerate.accelerator", _prepare)


def require_counted(hosts: int) -> None:
    """Checks that accelerate, if it is in use, counts a process for each host.

    Raises:
        SpmdZeroUsageError: it counts differently, as an unknown release of accelerate could.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if hosts == 1 or state is None or not state._shared_state:
        return
    counted = state().num_processes
    if counted != hosts:
        raise SpmdZeroUsageError(
            f"accelerate counts {counted} process, and {hosts} hosts train together: each would "
            "read all rows. Use accelerate 1.15, and call spmdzero.integrations.install() before "
            "`import accelerate`"
        )


def refuse_late(package: str) -> NoReturn:
    """Refuses a client that was imported before there was a package deepspeed.

    Raises:
        SpmdZeroUsageError: always.
    """
    raise SpmdZeroUsageError(
        f"{package} was imported before spmdzero.integrations, when it found no package "
        "deepspeed, and has left out what it does with one. Call spmdzero.integrations.install() "
        f"before `import {package}`, start the script by `spmdzero run`, or install "
        "spmdzero-deepspeed"
    )


def _count_hosts(states: Any) -> None:
    @in_place_of(states.PartialState, "_prepare_backend")
    def _prepare_backend(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # Whether there are other hosts is a question to the devices' runtime, which a process that
        # only launches must not ask.
        if os.environ.get(ASKED, "").lower() == "true" and not processes.is_alone():
            processes.join()
            if dist.get_world_size() > 1:
                _name_place()
                # accelerate's own choice, "cpu:0", differs in torch from the device "cpu" of
                # tensors.
                self.device = torch.device("cpu")
                return "gloo", states.DistributedType.MULTI_CPU
        return original(self, *args, **kwargs)


def _join_hosts(states: Any) -> None:
    @in_place_of(states.AcceleratorState, "__init__")
    def make(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # From here on accelerate calls torch's collectives. Under DeepSpeed's launcher it would
        # have made the process group for them by now, but a single process has no launcher.
        if not dist.is_initialized() and self.distributed_type == states.DistributedType.DEEPSPEED:
            choose(backend_of(self.deepspeed_plugin.deepspeed_config))
            processes.join()


def _name_place() -> None:
    """Sets the launcher's variables that accelerate reads, unless a launcher has set them."""
    place = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    # One process has all devices of a host.
    place |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, value in place.items():
        os.environ.setdefault(name, str(value))


def _prepare(accelerators: Any) -> None:
    @in_place_of(accelerators.Accelerator, "__init__")
    def make(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        named = given.get("mixed_precision") or os.environ.get(_PRECISION, "no")
        if str(named).lower() != "fp8" or not _asks_for_deepspeed(given):
            original(self, *args, **kwargs)
            return
        # accelerate would look for a library of CUDA's. The engine's own products are of 8 bits.
        given["mixed_precision"] = "bf16"
        handlers = given.get("kwargs_handlers") or []
        recipes = [h for h in handlers if type(h).__name__ in _OF_FP8]
        if recipes:
            log_once(
                f"{type(recipes[0]).__name__} is CUDA's: what it says of fp8 has no effect. "
                '"spmd": {"products": {"dtype": "fp8", "recipe": ..., "skip": [...]}} in the '
                "DeepSpeed JSON says it"
            )
        given["kwargs_handlers"] = [h for h in handlers if h not in recipes]
        original(**given)
        for plugin in _plugins(self.state):
            spmd = plugin.deepspeed_config.get("spmd") or {}
            if spmd.get("products") is None:
                spmd = {**spmd, "products": {"dtype": "fp8"}}
            plugin.deepspeed_config["spmd"] = spmd

    @in_place_of(accelerators.Accelerator, "_prepare_deepspeed")
    def _prepare_deepspeed(original: Any, self: Any, *args: Any) -> Any:
        if not hasattr(accelerators, "DummyOptim"):
            refuse_late("accelerate")
        _name_axis(self.deepspeed_plugin.deepspeed_config)
        shorten_dummies(args)
        return original(self, *args)


def _asks_for_deepspeed(given: dict[str, Any]) -> bool:
    # With either, accelerate turns DeepSpeed off.
    if given.get("cpu") or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
        return False
    plugins = given.get("deepspeed_plugin"), given.get("deepspeed_plugins")
    return any(plugins) or os.environ.get(ASKED, "").lower() == "true"


def _plugins(state: Any) -> list[Any]:
    plugins = state.deepspeed_plugins
    return [*plugins.values()] if isinstance(plugins, dict) else [plugins]


def _name_axis(config: dict[str, Any]) -> None:
    """Has the mesh say what ``tensor_parallel.autotp_size`` says, in `config` itself.

    accelerate would make a mesh of processes for that key, and one process drives all devices.

    Raises:
        SpmdZeroConfigError: the section is none of DeepSpeed's; or the mesh has another size.
    """
    section = config.get(_PARALLEL)
    if section is None:
        return
    size = load_config({"train_batch_size": 1, _PARALLEL: section}).tensor_parallel.autotp_size
    if size > 1:
        spmd = config.get("spmd") or {}
        mesh = with_value(
            spmd.get("mesh") or {"fsdp": -1}, "tensor", size,
            at="spmd.mesh.", otherwise=f"{_PARALLEL}.autotp_size = {size} says otherwise",
        )  # fmt: skip
        config["spmd"] = {**spmd, "mesh": mesh}
        config[_PARALLEL] = {key: section[key] for key in section if key != "autotp_size"}
