"""The ways by which a module's outputs leave the replica region."""

import logging
from collections.abc import Iterable
from typing import Any

import torch

from spmdzero.backend._current import arrays, programs
from spmdzero.backend.forms._tree import map_tensors
from spmdzero.backend.protocols._mesh import Mesh
from spmdzero.backend.protocols._region import OutputRule, RegionRules
from spmdzero.backend.replica._border import leave_batch, leave_mean
from spmdzero.backend.replica._written import note_disagreement
from spmdzero.errors import ReplicaRegionError

logger = logging.getLogger("spmdzero")
# Features of the rows' pictures, one row after the other, as transformers' models name them.
_OF_ROWS = frozenset({"image_hidden_states", "video_hidden_states"})


class Outputs:
    """Takes outputs out of the region by `rules`, or by their shapes.

    Args:
        mesh, rules, seed: of the region, see `ReplicaRegion`.
    """

    def __init__(self, *, mesh: Mesh, rules: RegionRules, seed: int) -> None:
        self._mesh, self._rules, self._seed = mesh, rules, seed
        self._named: set[str] = set()

    def leave(
        self, output: Any, replica_rows: dict[int, int], flags: dict[str, torch.Tensor]
    ) -> Any:
        """`output` in global space.

        Args:
            output: the module's output, in replica space.
            replica_rows: number of a replica's rows -> number of batches that are joined in them.
            flags: receives, by label, whether replicas differ where they must not.

        Raises:
            ReplicaRegionError: no rule covers a tensor, or a rule doesn't suit it.
        """
        paths: list[str] = []
        whole = map_tensors(
            output, lambda path, t: paths.append(path) or self._leave(path, t, replica_rows, flags)
        )
        self._warn_of_strangers(paths)
        return whole

    def leave_first(self, output: Any) -> Any:
        """The first replica's `output` in global space, after a forward in which each had all rows.

        Replicas may draw different dropout masks. One replica's output is what one device computes.
        One that is declared as ``stack`` is a stack of that one.
        """

        def leave(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if not arrays.is_mine(tensor):
                return tensor
            with programs.scope(f"zero.output/{path or 'loss'}"):
                stacked = leave_batch(tensor[None], 0, self._mesh, self._seed)
                first = stacked[:1] if self._rules.outputs.get(path) == "stack" else stacked[0]
                return self._mesh.whole(first)

        return map_tensors(output, leave)

    def _leave(
        self,
        path: str,
        tensor: torch.Tensor,
        replica_rows: dict[int, int],
        flags: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        if not arrays.is_mine(tensor):
            return tensor
        rule = self._rules.outputs.get(path) or self._rule_for(path, tensor, replica_rows)
        if rule == "mean" and not tensor.is_floating_point():
            raise ReplicaRegionError(
                f'output {path!r} is {tensor.dtype} and has no mean: declare "sum" or "stack"'
            )
        if rule == "agree" and tensor.requires_grad:
            raise ReplicaRegionError(
                f'output {path!r} carries a gradient, which "agree" would cut: declare "mean"'
            )
        if rule == "batch":
            dim = self._rules.batch_dim
            joined = replica_rows.get(tensor.shape[dim], 1)
            return leave_batch(tensor, dim, self._mesh, self._seed, joined=joined)
        if rule == "mean":
            with programs.scope(f"zero.output/{path or 'loss'}"):
                return leave_mean(tensor, self._mesh, self._seed)
        if rule == "sum" and tensor.is_floating_point():
            with programs.scope(f"zero.output/{path}"):
                return leave_mean(tensor, self._mesh, self._seed) * self._mesh.replicas
        stacked = leave_batch(tensor[None], 0, self._mesh, self._seed)
        if rule == "stack":
            return stacked
        if rule == "sum":
            with programs.scope(f"zero.output/{path}"):
                return self._mesh.whole(stacked.sum(0))
        with programs.scope(f"zero.output/{path}"):
            highest = stacked.detach().amax(0)
            note_disagreement(flags, f"output {path!r}", highest, stacked.detach().amin(0))
            return highest

    def _warn_of_strangers(self, paths: list[str]) -> None:
        strangers = set(self._rules.outputs) - set(paths) - self._named
        if strangers:
            self._named |= strangers
            logger.warning(
                "spmd.outputs names %s, which this forward does not return; it returns %s",
                ", ".join(sorted(strangers)),
                ", ".join(repr(path) for path in paths),
            )

    def _rule_for(
        self, path: str, tensor: torch.Tensor, replica_rows: dict[int, int]
    ) -> OutputRule:
        if tensor.dim() == 0:
            return "mean" if tensor.is_floating_point() else "agree"
        dim = self._rules.batch_dim
        if dim < tensor.dim() and (tensor.shape[dim] in replica_rows or path in _OF_ROWS):
            return "batch"
        raise ReplicaRegionError(
            f"output {path or 'of the model'!r} has shape {list(tensor.shape)}: it is neither a "
            f"scalar nor does its dim {dim} hold the replica's {_numbers(replica_rows)} rows, so "
            "spmdzero can't know how it leaves the replica region. Declare it: "
            f'"spmd": {{"outputs": {{"{path}": "mean"}}}} (or "batch", "sum", "agree", "stack"), '
            'or "spmd": {"batch_dim": 1} when the batch is the second dim'
        )


def _numbers(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in sorted(values)) or "0"
