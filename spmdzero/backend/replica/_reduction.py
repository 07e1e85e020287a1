"""The ways by which a gradient leaves the replica region: as a partial, or reduced."""

import dataclasses
import math
from typing import Literal

import torch
import torch.nn.functional as F

from spmdzero.backend._current import runtime
from spmdzero.backend.chips._torus import scatter_steps
from spmdzero.backend.protocols._mesh import Mesh
from spmdzero.backend.replica import _manual
from spmdzero.plan import Layout, names_of


@dataclasses.dataclass(frozen=True)
class GradientReduction:
    """Sums gradients over the replicas.

    Attributes:
        mesh: the devices.
        method: ``"annotated"`` sums the partial's rows in global space and marks the sum, for which
            GSPMD chooses the collective; ``"explicit"`` calls reduce-scatter inside the region.
        dtype: the dtype that crosses the wire, None for the gradient's own; each call may give
            another one for its tensor.
        steps: the sizes of the groups that reduce-scatter one after another over the axis fsdp;
            empty for all of it at once.
        in_int8: whether matrices cross in int8, and all else as ever (ZeRO++'s qgZ; DeepSpeed,
            runtime/comm/coalesced_collectives.py, `all_to_all_quant_reduce`).
    """

    mesh: Mesh
    method: Literal["annotated", "explicit"]
    dtype: torch.dtype | None = None
    steps: tuple[int, ...] = ()
    in_int8: bool = False

    @classmethod
    def over(
        cls,
        *,
        mesh: Mesh,
        method: Literal["annotated", "explicit", "auto"],
        dtype: torch.dtype | None = None,
        in_int8: bool = False,
    ) -> "GradientReduction":
        """The reduction that fits the chips: ``"auto"`` is the method that keeps a reduce-scatter.

        The TPU's compiler turns an annotated sum over two mesh axes into an all-reduce, and any sum
        over all of a torus on which it can't scatter at once: that sum is done in steps.
        """
        torus, spec = runtime.program_torus(), mesh.spec
        steps: tuple[int, ...] = ()
        if torus is not None and spec.data == 1 and math.prod(torus) == spec.fsdp:
            steps = scatter_steps(torus)
        if method == "auto":
            several = spec.data > 1 or spec.sequence > 1 or len(steps) > 1
            method = "explicit" if several else "annotated"
        return cls(mesh, method, dtype, steps, in_int8)

    def partial(self, local: torch.Tensor) -> torch.Tensor:
        """`[n, *shape]` in global space; row i is the gradient of device i, and nothing moves."""
        return _manual.leave_stacked(local, self.mesh)

    def reduce_local(
        self, local: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The sum over replicas of each device's `local` gradient, stored as `layout` says.

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
        tensor_dim = layout.placement.tensor_dim
        # Of a dim that both axes split the replicas' parts come first until it leaves the region.
        within = {"tensor_dim": None if tensor_dim == layout.placement.dim else tensor_dim}
        if self._quantizes(local.dim(), layout):
            scatter, moved, steps = self.mesh.scatter_in_int8, local.float(), {}
        else:
            scatter, steps = self.mesh.reduce_scatter, {"steps": self.steps}
        moved = scatter(moved, axis="fsdp", dim=dim, **steps, **within)
        if "data" in names_of(spec.states):
            moved = scatter(moved, axis="data", dim=dim, **within)
        elif spec.data > 1:
            moved = self.mesh.all_reduce(moved, axis="data", **within)
        return moved.to(local.dtype)

    def release_whole(self, gradient: torch.Tensor, layout: Layout) -> torch.Tensor:
        """A reduced gradient with the same values, of which each device keeps only its shard.

        XLA's CPU compiler turns the sum into an all-reduce. Each reader of the shard then slices it
        anew, because a slice is cheap: the norm once the gradient is there, the update at the end
        of the step. So every device would hold every whole gradient until then. XLA counts a
        division as expensive: it is done once, and only its result is kept. The divisor is 1,
        whatever the gradient is, but XLA sees that, and drops the division, only when it makes
        machine code. `spmdzero.explain` removes the division from programs that it compiles for
        TPUs.
        """
        if not layout.over_fsdp or runtime.program_platform() != "CPU":
            return gradient
        one = (gradient == gradient) | (gradient != gradient)
        return gradient / one.to(gradient.dtype)

    def reduce_partial(
        self, partial: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The sum over dim 0 of a partial `[n, *shape]`, stored as `layout` says."""
        if self._annotates(partial.dim() - 1, layout):
            return self._annotated(partial, layout, dtype=dtype)
        entered = self.mesh.enter(partial, self.mesh.batch_spec(partial.dim()))
        return self.reduce_local(entered.squeeze(0), layout, dtype=dtype)

    def _annotates(self, dims: int, layout: Layout) -> bool:
        """Whether the compiler chooses the collective: else it combines no sums of small tensors.

        Vectors count as small, too: libtpu scatters them in no step.
        """
        small = layout.kind == "replicate" or (len(self.steps) > 1 and dims < 2)
        return small or (self.method == "annotated" and not self._quantizes(dims, layout))

    def _quantizes(self, dims: int, layout: Layout) -> bool:
        return self.in_int8 and dims > 1 and layout.kind == "shard"

    def _annotated(
        self, partial: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None
    ) -> torch.Tensor:
        dtype = dtype or self.dtype
        moved = partial if dtype is None else partial.to(dtype)
        if layout.kind == "flat":
            moved = moved.reshape(self.mesh.replicas, -1)
            moved = F.pad(moved, (0, layout.stored[0] - moved.shape[1]))
        # Mark the sum before the cast: otherwise GSPMD would reduce in the wider dtype.
        total = self.mesh.lay(self.mesh.sum_partial(moved), layout)
        return self.release_whole(total, layout).to(partial.dtype)
