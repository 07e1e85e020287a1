"""Makes an engine of a config and a module."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from spmdzero.backend import same_on_hosts
from spmdzero.config import named_by, old_argument, one_of
from spmdzero.data._loader import ZeroDataLoader
from spmdzero.engine._engine import Engine
from spmdzero.engine._groups import ParameterGroups
from spmdzero.engine._plan_of import planned
from spmdzero.engine._setup import (
    make_training,
    place_module,
    read_settings,
    require_module,
    rest_on_host,
    start_backend,
)
from spmdzero.engine._start_line import say_start
from spmdzero.engine._tensor_axis import (
    share_asked,
    tensor_dims,
    with_asked_size,
    with_mesh_param,
    with_mpus_size,
)
from spmdzero.state._weights import Weights
from spmdzero.step._optimizer import ZeroOptimizer

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]

_watchers: list[Callable[[Engine], None]] = []


@contextlib.contextmanager
def engines_made(watcher: Callable[[Engine], None]) -> Iterator[None]:
    """Context in which `watcher` is handed each engine that is made."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@same_on_hosts()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    model_parameters: ParameterGroups | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | dict[str, Any] | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: str | dict[str, Any] | None = None,
    *,
    weights: Weights | None = None,
    engine_class: type[Engine] = Engine,
) -> tuple[Engine, ZeroOptimizer | None, ZeroDataLoader | None, Any]:
    """Places a module and its training state on all devices; DeepSpeed's signature.

    Args:
        args: a namespace whose `deepspeed_config` names the JSON if `config` is not given.
        model: on the CPU, on the XLA device, or (with `weights`) on the meta device. It is moved
            in place: parameters replicated (bf16 when the config says so), optimizer states
            sharded by the config's ZeRO stage.
        optimizer: None takes the config's; a torch optimizer whose update is elementwise, or a
            callable that makes one from parameters (or groups), brings its own param groups.
        model_parameters: parameters or param groups to train; by default the module's trainable
            parameters.
        training_data: a dataset for the returned loader.
        lr_scheduler: None takes the config's; a schedule bound to `optimizer`, or a callable that
            makes one from the optimizer.
        distributed_port: has no effect; the launcher's environment names the port.
        dist_init_required: False requires that `init_distributed` was called before.
        mpu: None, or what `UlyssesSPAttentionHF.register_with_transformers` has returned, whose
            size is ``sequence_parallel_size``.
        mesh_param: number of replicas, and of devices that share the rows of each
            (``data_parallel_size`` and ``sequence_parallel_size``).
        collate_fn: samples -> batch, for the loader.
        config: path of a DeepSpeed JSON, or its dict. `config_params` is the old name.
        weights: an argument of spmdzero: a safetensors file, its index, a folder with either, or a
            function from a tensor's name to its value on the CPU. Parameters and buffers are filled
            one at a time, in the model's dtype; buffers with ``persistent=False`` may be missing
            there.
        engine_class: an argument of spmdzero: a subclass of `Engine` that adapts it to a framework.

    Returns the engine, its optimizer, the loader (None without `training_data`) and the schedule.

    Raises:
        SpmdZeroConfigError: the config can't be honoured.
        SpmdZeroUsageError: an argument can't be used.
        SpmdZeroRuntimeError: a device was used before SPMD was on.
    """
    module = require_module(model)
    given = one_of(old_argument(config, config_params), named_by(args))
    sized = with_mesh_param(with_asked_size(given, module), mesh_param)
    settings = read_settings(with_mpus_size(sized, mpu))
    mesh, batch = start_backend(settings, dist_init_required=dist_init_required)
    share_asked(mesh_param, mesh.spec)
    say_start(settings, batch, mesh.spec, of_process=engine_class._rows_of_process)
    shared, host = tensor_dims(settings, module, mesh=mesh.spec), rest_on_host(settings)
    known: Any = {"batch": batch, "mesh": mesh.spec, "shared": shared, "on_host": host}
    # An optimizer takes parameters that are placed, and the plan says where that is.
    trained = (optimizer, model_parameters)
    plan = planned(settings, module, None, **known)
    groups = place_module(settings, module, mesh, plan, weights, trained)
    plan = planned(settings, module, groups, **known)
    kind = engine_class.optimizer_class
    training = make_training(
        settings, module, groups, lr_scheduler, kind, batch=batch, plan=plan, mesh=mesh
    )
    engine = engine_class(training, client_optimizer=groups.client if groups else None)
    for watcher in _watchers:
        watcher(engine)
    if training_data is not None:
        training.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, training.optimizer, training.training_dataloader, training.lr_scheduler
