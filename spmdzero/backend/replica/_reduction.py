"""How a gradient leaves the replica region: kept Partial, or reduced to the plan's layout."""

import dataclasses
import math
from typing import Literal

import torch
import torch.nn.functional as F

from spmdzero.backend._current import runtime
from spmdzero.backend.chips._torus import scatter_steps
from spmdzero.backend.protocols._mesh import Mesh
from spmdzero.backend.replica import _manual
from spmdzero.plan import Layout


@dataclasses.dataclass(frozen=True)
class GradientReduction:
    """Sums gradients over the replicas.

    Attributes:
        mesh: the devices.
        method: ``"annotated"`` sums the Partial rows in global space and marks the sum, GSPMD
            chooses the collective; ``"explicit"`` calls reduce-scatter inside the region.
        dtype: the dtype that crosses the wire, None for the gradient's own; each call may name
            another for its tensor.
        steps: the lengths of the groups that reduce-scatter one after another over the axis fsdp;
            none for all of it at once.
    """

    mesh: Mesh
    method: Literal["annotated", "explicit"]
    dtype: torch.dtype | None = None
    steps: tuple[int, ...] = ()

    @classmethod
    def over(
        cls,
        *,
        mesh: Mesh,
        method: Literal["annotated", "explicit", "auto"],
        dtype: torch.dtype | None = None,
    ) -> "GradientReduction":
        """The one that fits the chips: ``"auto"`` is the method that keeps a reduce-scatter.

        The TPU's compiler makes an all-reduce of an annotated sum over two mesh axes, and of any
        sum over all of a torus that it does not scatter over: that one goes in steps.
        """
        torus, spec = runtime.program_torus(), mesh.spec
        steps: tuple[int, ...] = ()
        if torus is not None and spec.data == 1 and math.prod(torus) == spec.fsdp:
            steps = scatter_steps(torus)
        if method == "auto":
            method = "explicit" if spec.data > 1 or len(steps) > 1 else "annotated"
        return cls(mesh, method, dtype, steps)

    def partial(self, local: torch.Tensor) -> torch.Tensor:
        """`[n, *shape]` in global space, row i being device i's own gradient: nothing moves."""
        return _manual.leave_stacked(local, self.mesh)

    def reduce_local(
        self, local: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The sum over replicas of each device's `local` gradient, placed as planned.

        Returns a global tensor of the layout's stored shape: the parameter's shape, or
        `[padded]` where the plan flattens.
        """
        if self._annotates(local.dim(), layout):
            return self._annotated(self.partial(local), layout, dtype=dtype)
        part = self.part_of_sum(local, layout, dtype=dtype)
        return self.mesh.leave(part, layout.spec, layout.stored)

    def part_of_sum(
        self, local: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """This device's part of the sum over replicas of each device's `local`, in replica space.

        It is reduced by a call, whatever the method: a loop's body has no global space.
        """
        spec, dtype = self.mesh.spec, dtype or self.dtype
        moved = local if dtype is None else local.to(dtype)
        dim = layout.placement.dim or 0
        if layout.kind == "flat":
            moved = F.pad(moved.reshape(-1), (0, layout.stored[0] - moved.numel()))
        moved = self.mesh.reduce_scatter(moved, axis="fsdp", dim=dim, steps=self.steps)
        if spec.data > 1:
            moved = self.mesh.all_reduce(moved, axis="data")
        return moved.to(local.dtype)

    def let_go_of_whole(self, gradient: torch.Tensor, layout: Layout) -> torch.Tensor:
        """A reduced gradient, the same number for number, of which devices keep their shards only.

        XLA's CPU compiler makes an all-reduce of the sum, and of the shard a slice that each of
        its readers takes anew, because that is cheap: the norm when the gradient is there, the
        update at the end of the step. So every device held every gradient whole until then. A
        division counts as dear: it is done once, and its result is all that is kept. It is by 1,
        whatever the gradient is; that is seen, and the division left out, only when machine code
        is made. `spmdzero.explain` takes it out of what it compiles for TPUs.
        """
        if not layout.is_sharded or runtime.program_platform() != "CPU":
            return gradient
        one = (gradient == gradient) | (gradient != gradient)
        return gradient / one.to(gradient.dtype)

    def reduce_partial(
        self, partial: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The sum over dim 0 of a Partial `[n, *shape]`, placed as planned."""
        if self._annotates(partial.dim() - 1, layout):
            return self._annotated(partial, layout, dtype=dtype)
        entered = self.mesh.enter(partial, self.mesh.batch_spec(partial.dim()))
        return self.reduce_local(entered.squeeze(0), layout, dtype=dtype)

    def _annotates(self, dims: int, layout: Layout) -> bool:
        """Whether the compiler may choose: it combines the sums of small tensors only then.

        Those of vectors too, which libtpu scatters in no step.
        """
        small = layout.kind == "replicate" or (len(self.steps) > 1 and dims < 2)
        return self.method == "annotated" or small

    def _annotated(
        self, partial: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None
    ) -> torch.Tensor:
        dtype = dtype or self.dtype
        moved = partial if dtype is None else partial.to(dtype)
        if layout.kind == "flat":
            moved = moved.reshape(self.mesh.replicas, -1)
            moved = F.pad(moved, (0, layout.stored[0] - moved.shape[1]))
        # The sum is marked before the cast: GSPMD would otherwise reduce in the wider dtype.
        total = self.mesh.mark(self.mesh.sum_partial(moved), layout.spec)
        return self.let_go_of_whole(total, layout).to(partial.dtype)
