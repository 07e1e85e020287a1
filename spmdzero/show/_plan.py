"""Pages of plans and memory reports."""

from collections.abc import Sequence

from spmdzero._display import page_of
from spmdzero.plan import MemoryReport, Role, ShardingPlan, StageComparison, TensorPlan
from spmdzero.show._page import Page, Table

_LEGEND = "R replicated, S(dim) sharded, F flattened and sharded, P each device's own summand"


@page_of.register
def plan_page(plan: ShardingPlan) -> Page:
    """A page with the placements of each tensor, and the bytes of each role."""
    tensors = Table(
        title=f"ZeRO stage {plan.stage} on the mesh {plan.mesh}: {len(plan):,} tensors",
        headers=("name", "shape", "dtype", *Role, "why"),
        rows=[_tensor_row(tensor, plan) for tensor in plan],
        notes=[_LEGEND],
    )
    return Page((tensors, *memory_page(plan.memory()).parts))


@page_of.register
def memory_page(report: MemoryReport) -> Page:
    """A page with the bytes per device of each role."""
    rows, there = _memory_rows([report]), dict(report.on_host)
    if there:
        of_host = [*(there[role] for role in Role), report.host_total]
        rows = [[*row, f"{size:,}"] for row, size in zip(rows, of_host, strict=True)]
    table = Table(
        title="Memory per device",
        headers=("role", "bytes", "in host memory")[: len(rows[0])],
        rows=rows,
        numbers={*range(1, len(rows[0]))},
        totals=1,
    )
    return Page((table,))


@page_of.register
def comparison_page(comparison: StageComparison) -> Page:
    """A page with the stages side by side."""
    rows = _memory_rows(comparison.stages)
    if any(stage.host_total for stage in comparison.stages):
        rows.append(["in host memory", *(f"{s.host_total:,}" for s in comparison.stages)])
    if comparison.paper is not None:
        rows.append(["ZeRO paper", *(f"{size:,}" for size in comparison.paper)])
    table = Table(
        title="Bytes per device by ZeRO stage",
        headers=("role", *(f"stage {stage}" for stage in range(len(comparison.stages)))),
        rows=rows,
        numbers={*range(1, len(comparison.stages) + 1)},
        totals=len(rows) - len(Role),
        notes=[comparison.paper_note],
    )
    return Page((table,))


def _tensor_row(tensor: TensorPlan, plan: ShardingPlan) -> list[str]:
    placements = [tensor.placement(role) for role in Role]
    state = tensor.placement(Role.GRADIENT) or tensor.placement(Role.PARAMETER)
    return [
        tensor.name,
        "x".join(f"{length:,}" for length in tensor.shape) or "scalar",
        tensor.dtype(Role.PARAMETER),
        *("-" if found is None else found.short(tensor.shape, plan.mesh) for found in placements),
        "" if state is None or state.kind == "shard" else state.reason,
    ]


def _memory_rows(reports: Sequence[MemoryReport]) -> list[list[str]]:
    rows = [[str(role), *(f"{report[role]:,}" for report in reports)] for role in Role]
    return [*rows, ["total", *(f"{report.total:,}" for report in reports)]]
