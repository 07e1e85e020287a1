"""The memory of a plan, in bytes per device."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from spmdzero._display import Shown
from spmdzero.plan._dtypes import itemsize
from spmdzero.plan._layout import Layout
from spmdzero.plan._mesh import MeshSpec
from spmdzero.plan._roles import Role
from spmdzero.plan._tensors import TensorPlan


@dataclass(frozen=True)
class MemoryReport(Shown):
    """Bytes per device of each role, without activations and the compiler's buffers.

    Attributes:
        bytes_per_role: (role, bytes per device), in the order of `Role`; MOMENT counts all slots.
        on_host: (role, bytes of host memory for each device) of states on the host; may be empty.
    """

    bytes_per_role: tuple[tuple[Role, int], ...]
    on_host: tuple[tuple[Role, int], ...] = ()

    def __getitem__(self, role: Role) -> int:
        return dict(self.bytes_per_role)[role]

    def __iter__(self) -> Iterator[tuple[Role, int]]:
        return iter(self.bytes_per_role)

    @property
    def total(self) -> int:
        """Bytes per device of all roles together, as during the step.

        GRADIENT lives only during the step; between micro-batches the ACCUMULATOR lives instead.
        """
        return sum(size for _, size in self.bytes_per_role)

    @property
    def host_total(self) -> int:
        """Bytes of host memory for each device, of all roles together."""
        return sum(size for _, size in self.on_host)

    def __str__(self) -> str:
        said = f"{_listed((*self, ('total', self.total)))} bytes per device"
        if self.host_total:
            there = [(role, size) for role, size in self.on_host if size]
            said += f", and in host memory {_listed((*there, ('total', self.host_total)))}"
        return said


def _listed(sizes: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{role} {size:,}" for role, size in sizes)


@dataclass(frozen=True, kw_only=True)
class StageComparison(Shown):
    """The memory of one model at the stages 0 to 3.

    Attributes:
        stages: the report of each stage.
        paper: bytes per device of each stage by the ZeRO paper's formula; None if the formula
            doesn't apply.
        paper_note: when the formula applies, or why it doesn't here.
    """

    stages: tuple[MemoryReport, ...]
    paper: tuple[int, ...] | None
    paper_note: str


def memory_report(
    tensors: Iterable[TensorPlan],
    mesh: MeshSpec,
    *,
    slots: Callable[[TensorPlan], Sequence[tuple[Layout, str]]],
    on_host: Callable[[Role, TensorPlan], bool],
) -> MemoryReport:
    """Bytes per device of each role of a plan, padding included.

    Args:
        tensors, mesh: the plan's.
        slots: layout and dtype of each of a parameter's slots.
        on_host: whether a role of a parameter rests in host memory.
    """
    totals, there = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0)
    for tensor in tensors:
        for state in tensor.states:
            if state.role is Role.MOMENT:
                for layout, dtype in slots(tensor):
                    counted = there if layout.on_host else totals
                    counted[Role.MOMENT] += math.prod(layout.local) * itemsize(dtype)
                continue
            elements = math.prod(state.placement.local_shape(tensor.shape, mesh))
            counted = there if on_host(state.role, tensor) else totals
            counted[state.role] += elements * itemsize(state.dtype)
    return MemoryReport(tuple(totals.items()), tuple(there.items()) if any(there.values()) else ())


def paper_formula(
    tensors: Sequence[TensorPlan],
    mesh: MeshSpec,
    *,
    slots: Callable[[TensorPlan], Sequence[tuple[Layout, str]]],
) -> tuple[tuple[int, ...] | None, str]:
    """Bytes per device at the stages 0 to 3 by the ZeRO paper's formula, and a note on it.

    The formula is 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N (ZeRO, arXiv 1910.02054, section 5). The bytes
    are None if it doesn't apply to this plan.
    """
    note = (
        "ZeRO, arXiv 1910.02054, section 5: 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N bytes for mixed "
        "precision Adam: 16-bit parameters and gradients, fp32 master and two fp32 moments, all "
        "trainable"
    )
    mixed_precision_adam = all(
        [(layout.shape, dtype) for layout, dtype in slots(tensor)]
        == [(tensor.shape, "float32")] * 2
        and tensor.placement(Role.MASTER) is not None
        and tensor.dtype(Role.MASTER) == "float32"
        and itemsize(tensor.dtype(Role.PARAMETER)) == 2
        and itemsize(tensor.dtype(Role.GRADIENT)) == 2
        for tensor in tensors
    )
    if not mixed_precision_adam:
        return None, f"The paper's formula doesn't apply to this plan ({note})."
    psi, n = sum(tensor.elements_of_part(mesh) for tensor in tensors), mesh.shards
    halves = round(4 * psi + 12 * psi / n), round(2 * psi + 14 * psi / n)
    among = "the fsdp axis"
    if n != mesh.fsdp:
        among = f"both axes; at stage 3 parameters have the {mesh.fsdp} of fsdp"
    own = " (what one device of the tensor axis has)" if mesh.tensor > 1 else ""
    paper = (16 * psi, *halves, round(2 * psi / mesh.fsdp + 14 * psi / n))
    return paper, (
        f"{note}. Ψ = {psi:,}{own}, N = {n} ({among}). It counts one gradient, at stage 1 before "
        "its reduction, no padding, and no small replicated tensors."
    )
