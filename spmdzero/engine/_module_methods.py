"""Methods for an engine's module and data, under DeepSpeed's names."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from spmdzero.backend import arrays, current, runtime, undistributed
from spmdzero.data._loader import ZeroDataLoader
from spmdzero.engine._module_hooks import ModuleHook
from spmdzero.errors import SpmdZeroUsageError, UsageValueError
from spmdzero.state._training import Training
from spmdzero.step._optimizer import ZeroOptimizer


class ModuleMethods:
    """Loads and reads the module of `training`, and makes loaders for it."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
        *,
        as_dtensor: bool = False,
    ) -> dict[str, Any]:
        """The module's state dict on the devices, with or without its frozen parameters.

        Args:
            destination, prefix, keep_vars: as in torch.
            exclude_frozen_parameters: leave out parameters that don't require gradients.
            as_dtensor: an argument of spmdzero: DTensors in the host's memory, as those of
                `distributed_state`, for `torch.distributed.checkpoint` and torch's other tools.
                Every host calls it then.

        Raises:
            SpmdZeroUsageError: `as_dtensor` and `keep_vars`.
        """
        state = {} if destination is None else destination
        module = self._training.module
        named = module.named_parameters(remove_duplicate=False)
        left_out = {n for n, p in named if exclude_frozen_parameters and not p.requires_grad}
        if not as_dtensor:
            module.state_dict(destination=state, prefix=prefix, keep_vars=keep_vars)
            for name in left_out:
                state.pop(prefix + name, None)
            return state
        if keep_vars:
            raise SpmdZeroUsageError(
                "module_state_dict(as_dtensor=True, keep_vars=True): DTensors are copies on the "
                "CPU, no variables of the module. Leave one of the two out"
            )
        # Importing DTensors would take time at each start.
        from spmdzero.state._dtensors import module_dtensors

        found = module_dtensors(self._training, without=frozenset(left_out))
        state.update({prefix + name: value for name, value in found.items()})
        return state

    def empty_partition_cache(self) -> None:
        """Does nothing: no gathered parameter outlives the operations that use it."""

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., None] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Iterable[nn.Parameter] | None = None,
        allowed_missing_keys: Iterable[str] | None = None,
    ) -> None:
        """Loads `checkpoint["module"]` into the module, and into the fp32 masters.

        Args:
            checkpoint: holds the state dict under ``"module"``.
            strict: names must match, except for `allowed_missing_keys`.
            custom_load_fn: called as `custom_load_fn(src=..., dst=module)` instead of torch's
                method.
            fetch_z3_params, z3_params_to_fetch: have no effect; a parameter is written as a whole
                at every stage.

        Raises:
            SpmdZeroUsageError: there is no ``"module"``; or names don't match, and
                `allowed_missing_keys` is given.
            RuntimeError: names don't match, from torch.
        """
        if "module" not in checkpoint:
            raise SpmdZeroUsageError(
                "load_module_state_dict takes a checkpoint, which holds the state dict under "
                f"'module'; this one holds {sorted(checkpoint)[:5]}. For a plain state dict: "
                "engine.module.load_state_dict(...)"
            )
        state = checkpoint["module"]
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self._training.module)
            if self._training.optimizer is not None:
                self._training.optimizer.refresh_masters()
                runtime.sync()
            return
        result = self._training.module.load_state_dict(
            state, strict=strict and allowed_missing_keys is None
        )
        if strict and allowed_missing_keys is not None:
            missing = set(result.missing_keys) - set(allowed_missing_keys)
            if missing or result.unexpected_keys:
                raise SpmdZeroUsageError(
                    f"the state dict does not match the module: missing {sorted(missing)}, "
                    f"unexpected {sorted(result.unexpected_keys)}"
                )

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> ZeroDataLoader:
        """A loader of global micro-batches, as `initialize(training_data=...)` makes one.

        Args:
            dataset: map-style or iterable.
            batch_size: None, or the config's micro-batch size.
            route: ``"train"`` shuffles, ``"eval"`` and ``"predict"`` keep the order.
            pin_memory: has no effect, as XLA copies from ordinary memory.
            data_sampler: refused; the loader chooses each device's rows as DeepSpeed's ranks would.
            collate_fn: samples -> batch.
            num_local_io_workers: number of processes that read.

        Raises:
            UsageValueError: `dataset` is not a dataset.
            SpmdZeroUsageError: a batch size that is not the config's, or a sampler.
        """
        if not (self.is_map_style_dataset(dataset) or self.is_iterable_style_dataset(dataset)):
            raise UsageValueError(
                f"deepspeed_io takes a torch Dataset, got {type(dataset).__name__}"
            )
        training, placer = self._training, self._training.placer
        if batch_size not in (None, placer.rows.micro_batch):
            raise SpmdZeroUsageError(
                f"deepspeed_io(batch_size={batch_size}): the engine's micro-batch has "
                f"{placer.rows.micro_batch} rows per device. Leave it out, or use a torch "
                "DataLoader of your own"
            )
        if data_sampler is not None:
            raise SpmdZeroUsageError(
                "deepspeed_io(data_sampler=...): rows are split over devices by the loader. Use a "
                "torch DataLoader with your sampler and train_micro_batch_size_per_gpu x devices "
                "rows per batch"
            )
        return ZeroDataLoader(
            dataset,
            mesh=training.mesh,
            placer=placer,
            steps=lambda: training.counters.micro_steps,
            batch_dim=placer.batch_dim(""),
            shuffle=route == "train",
            drop_last=training.spmd_config.dataloader_drop_last,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
        )

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        """Whether `obj` has a length and items."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        """Whether `obj` is a torch IterableDataset."""
        return isinstance(obj, IterableDataset)

    def allreduce_gradients(self, bucket_size: int = 500000000) -> None:
        """Does nothing: the step's program reduces gradients where the plan needs it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients summed so far."""
        self._training.gradients.forget(self._training.module.parameters())


class LoadsFollow(ModuleHook):
    """Hooks of each submodule that copy what `load_state_dict` wrote to the optimizer's masters.

    Otherwise the masters would undo the load at the next step. The masters of parameters that a
    partial state dict leaves out keep their digits. DTensors of the state dict are made whole
    before. On a copy or a pickle of the module, which belongs to no engine, the hooks copy nothing.
    """

    def __init__(self, optimizer: ZeroOptimizer | None = None) -> None:
        # Hooks of a module must not keep the states of an engine that is gone.
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None
        self._stamps: dict[torch.Tensor, object] = {}

    def watch(self, model: nn.Module) -> None:
        """Watches loads into `model` and into each of its submodules."""
        self.take_the_place_of_outlived(model)
        for module in model.modules():
            module.register_load_state_dict_pre_hook(self._before)
            module.register_load_state_dict_post_hook(self._after)

    @property
    def outlived(self) -> bool:
        """Whether the engine of this hook is gone."""
        return self._optimizer() is None

    def _before(
        self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        if self._optimizer() is not None and metadata.get("assign_to_params_buffers"):
            raise SpmdZeroUsageError(
                "load_state_dict(assign=True) would replace parameters that the engine trains by "
                "others. Leave assign out: values are copied onto the devices"
            )
        for name in (*module._parameters, *module._buffers):
            if prefix + name in state:
                state[prefix + name] = undistributed(state[prefix + name])
        if current().in_region():
            # A forward loads into a replica's copies; the masters follow them as after any write.
            return
        for parameter in module.parameters(recurse=False):
            # The user may have moved the module off the devices, and its engine with it.
            if arrays.is_mine(parameter):
                self._stamps[parameter] = arrays.write_stamp(parameter)

    def _after(self, module: nn.Module, _: Any) -> None:
        own = [p for p in module.parameters(recurse=False) if p in self._stamps]
        written = {p for p in own if self._stamps.pop(p) != arrays.write_stamp(p)}
        optimizer = self._optimizer()
        if written and optimizer is not None:
            optimizer.refresh_masters(written)
            runtime.sync()

    def __reduce__(self) -> Any:
        return LoadsFollow, ()
