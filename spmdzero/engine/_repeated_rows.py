"""Runs a forward again with each row of a device repeated."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from spmdzero.backend import Batch, Region, map_tensors
from spmdzero.backend.pure import GeneratorWatch, ModuleWatch
from spmdzero.engine._programs import Compiled, ProgramLog
from spmdzero.state._training import Training


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatedRows:
    """The forward of a micro-batch that can be run again; it holds its inputs on the devices.

    Attributes:
        training: the training of the engine.
        region: the replica region in which the forward runs.
        programs: counts the compilations and reads of this class apart from the script's.
        args, kwargs: the forward's placed inputs.
    """

    training: Training
    region: Region
    programs: ProgramLog
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def losses(self, *, times: int) -> dict[str, float]:
        """Path -> value of each undeclared scalar output that has a gradient, thus is a mean.

        The module and the generators are left as they were.

        Args:
            times: number of times that each row is repeated among a device's rows.

        Raises what the module's forward raises.
        """
        before, undone = Compiled.so_far(), ModuleWatch(self.training.module, {})
        try:
            with GeneratorWatch(), undone, self.programs.own_reads(), torch.enable_grad():
                found = self._scalars(times)
                values = torch.stack(list(found.values())).tolist() if found else []
        finally:
            self.programs.not_the_scripts(Compiled.so_far() - before)
        return dict(zip(found, values, strict=True))

    def _scalars(self, times: int) -> dict[str, torch.Tensor]:
        declared = self.training.spmd_config.spmd.outputs
        found: dict[str, torch.Tensor] = {}

        def repeat(_: str, tensor: Any) -> Any:
            return self._repeated(tensor, times) if isinstance(tensor, Batch) else tensor

        def look(path: str, tensor: torch.Tensor) -> torch.Tensor:
            scalar = tensor.dim() == 0 and tensor.is_floating_point()
            if scalar and tensor.requires_grad and path not in declared:
                # A scalar with its graph would keep activations until it is read.
                found[path] = tensor.detach().float()
            return tensor

        args, kwargs = map_tensors((self.args, dict(self.kwargs)), repeat)
        for name in self.training.row_counts & kwargs.keys():
            kwargs[name] = kwargs[name] * times
        map_tensors(self.region.look(args, kwargs), look)
        return found

    def _repeated(self, batch: Batch, times: int) -> Batch:
        if times == 1 or not batch.shared:
            return batch
        rows, mesh = batch.tensor.repeat_interleave(times, batch.dim), self.training.mesh
        marked = mesh.mark(rows, mesh.batch_spec(rows.dim(), batch.dim))
        return dataclasses.replace(batch, tensor=marked)
