"""Writes the engine's state for other programs: DeepSpeed, and programs that read weights."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spmdzero.engine._accumulation import Accumulation
from spmdzero.engine._tensor_axis import autotp_parts
from spmdzero.errors import SpmdZeroCheckpointError, UsageValueError
from spmdzero.formats import (
    Conversion,
    TrainingState,
    Weights,
    check_tag,
    save_torch,
    write_for_deepspeed,
)
from spmdzero.state._by_the_first_host import written_by_the_first_host
from spmdzero.state._live_state import live_state
from spmdzero.state._training import Training

if TYPE_CHECKING:
    from spmdzero.state._distributed_state import DistributedState


class Exports:
    """Writes the state of `training` for other programs."""

    def __init__(self, training: Training, accumulation: Accumulation) -> None:
        self._training, self._accumulation = training, accumulation

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the module's state dict as one torch file, in the dtypes of training.

        One tensor is in memory at a time. Meanwhile all tensors are in the system's temporary
        folder (`tempfile.gettempdir()`), on the first of several hosts. At stage 3 the tensors are
        read from the shards: DeepSpeed writes nothing at that stage, and returns False, unless
        ``stage3_gather_16bit_weights_on_model_save`` is true.

        Args:
            save_dir: the folder, made if it is missing.
            save_filename: the file in it, for `torch.load(weights_only=True)`.
            exclude_frozen_parameters: leave out parameters that don't require gradients.

        Returns True.

        Raises:
            SpmdZeroCheckpointError: the file can't be written; an earlier file is as it was.
            SpmdZeroRuntimeError: the first of several hosts, which writes, could not.
        """
        file = Path(save_dir) / save_filename

        def write(state: TrainingState) -> None:
            try:
                save_torch(Weights.of(state).state_dict() | dict(state.host.extra), file)
            except OSError as error:
                raise SpmdZeroCheckpointError(
                    file=error.filename or file,
                    reason=f"can't be written: {error.strerror or error}",
                ) from error

        state = live_state(self._training, exclude_frozen=exclude_frozen_parameters)
        written_by_the_first_host(state, write)
        return True

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The module's state dict, whole and on the CPU, in the dtypes of training.

        Clients ask a stage 3 engine for it. Tied parameters are one tensor.

        Args:
            exclude_frozen_parameters: leave out parameters that don't require gradients.

        Returns None on all hosts but the first, as DeepSpeed does on all ranks but the first.

        Raises:
            UsageValueError: below stage 3.
            SpmdZeroRuntimeError: the first of several hosts could not read the parts of the others.
        """
        if self._training.plan.stage != 3:
            raise UsageValueError(
                "_zero3_consolidated_16bit_state_dict() is stage 3's, and zero_optimization.stage "
                f"is {self._training.plan.stage}. Use engine.module_state_dict()"
            )
        found: dict[str, torch.Tensor] | None = None

        def keep(state: TrainingState) -> None:
            nonlocal found
            found = Weights.of(state).state_dict()

        state = live_state(self._training, exclude_frozen=exclude_frozen_parameters)
        written_by_the_first_host(state, keep)
        return found

    def distributed_state(self) -> "DistributedState":
        """The state as DTensors, which `torch.distributed.checkpoint` saves and loads.

        Every host calls it, and what it returns. It makes a process group if there is none.
        """
        # Importing DTensors would take time at each start.
        from spmdzero.state._distributed_state import DistributedState

        return DistributedState(self._training)

    def save_fp16_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin"
    ) -> bool:
        """Calls `save_16bit_model`, by DeepSpeed's old name."""
        return self.save_16bit_model(save_dir, save_filename)

    def save_deepspeed_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        *,
        universal: bool = True,
        ranks: int | None = None,
        autotp_size: int | None = None,
    ) -> bool:
        """Writes a checkpoint from which real DeepSpeed can resume, on GPUs or anywhere.

        Args:
            save_dir, tag, client_state, save_latest: as in `save_checkpoint`.
            universal: write DeepSpeed's universal format, which any number of ranks loads with
                ``"checkpoint": {"load_universal": true}``; it is saved as `<tag>_universal`, and
                the file `latest_universal` names it. False writes the files that the ranks of a run
                at this stage would write (of ZeRO-1 at stage 0), which exactly `ranks` ranks load.
            ranks: number of data-parallel ranks if `universal` is False; by default the number of
                replicas.
            autotp_size: the run's ``tensor_parallel.autotp_size``, each of whose ranks loads its
                part of the weights; by default the size of the mesh's axis ``tensor``, and 1 writes
                them whole.

        Returns True.

        Raises:
            SpmdZeroCheckpointError: the checkpoint can't be written; earlier ones are as they were.
            SpmdZeroConfigError: so many AutoTP ranks can't share the weights.
            SpmdZeroUsageError: without an optimizer, in the middle of gradient accumulation, or a
                tag that is no name of a folder.
            SpmdZeroRuntimeError: the first of several hosts, which writes, could not.
        """
        training = self._training
        self._accumulation.refuse_inside("save_deepspeed_checkpoint")
        conversion = Conversion(
            to="universal" if universal else "deepspeed",
            ranks=ranks if ranks is not None else training.mesh.replicas,
            stage=training.plan.stage or 1,
        )
        config = {key: value for key, value in training.spmd_config.source.items() if key != "spmd"}
        step = training.counters.global_steps
        named = check_tag(f"global_step{step}" if tag is None else str(tag))
        size = training.mesh.spec.tensor if autotp_size is None else autotp_size
        shared = autotp_parts(training.spmd_config, training.module, size=size)

        def write(state: TrainingState) -> None:
            write_for_deepspeed(
                state,
                Path(save_dir),
                named,
                conversion,
                config=config,
                latest=save_latest,
                tensor_parallel=shared,
            )

        written_by_the_first_host(live_state(training, client_state=client_state), write)
        return True
