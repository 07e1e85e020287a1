"""A model's profile as text, arranged as DeepSpeed's print_model_profile arranges it."""

import io
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from spmdzero.show._rich import Console, Table, box

if TYPE_CHECKING:
    from spmdzero.profiling.flops_profiler._profile import ModelProfile

_WIDTH = 78


def human(value: float, unit: str = "") -> str:
    """A number with two decimals and a decimal prefix: ``1.23 G``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {prefix}{unit}"
    return f"{value:g} {unit}".rstrip()


def report(
    profile: "ModelProfile",
    *,
    facts: dict[str, str],
    module_depth: int,
    top_modules: int,
    detailed: bool,
) -> str:
    """The whole report."""
    summary = facts | {
        "params per GPU:": human(profile.params),
        "fwd MACs per GPU:": human(profile.macs, "MACs"),
        "fwd flops per GPU:": human(profile.flops),
        "bwd and update flops per GPU:": human(2 * profile.other_macs),
    }
    lines = [
        _rule(" Flops Profiler "),
        *(f"{key:<62}  {value}" for key, value in summary.items()),
        _rule(" Aggregated Profile per GPU "),
        f"Top {top_modules} modules in terms of params and MACs at different model depths:",
        *_aggregated(profile, module_depth, top_modules),
    ]
    if detailed:
        lines += [_rule(" Detailed Profile per GPU "), *_detailed(profile)]
    return "\n".join([*lines, "-" * _WIDTH])


def _rule(title: str) -> str:
    return title.center(_WIDTH, "-")


def _aggregated(profile: "ModelProfile", module_depth: int, top: int) -> Iterator[str]:
    params: dict[int, Counter[str]] = defaultdict(Counter)
    macs: dict[int, Counter[str]] = defaultdict(Counter)
    for module in profile.modules:
        params[module.depth][module.kind] += module.params
        macs[module.depth][module.kind] += module.macs
    for depth in sorted(params)[: module_depth if module_depth >= 0 else None]:
        named_params = {kind: human(count) for kind, count in params[depth].most_common(top)}
        named_macs = {kind: human(count, "MACs") for kind, count in macs[depth].most_common(top)}
        yield f"depth {depth}:"
        yield f"    params      - {named_params}"
        yield f"    MACs        - {named_macs}"


def _detailed(profile: "ModelProfile") -> list[str]:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("module", "class", "params", "% params", "MACs", "% MACs"):
        table.add_column(
            heading, justify="left" if heading in ("module", "class") else "right", no_wrap=True
        )
    for module in profile.modules:
        table.add_row(
            module.name or "(model)", module.kind,
            f"{module.params:,}", _percent(module.params, profile.params),
            f"{module.macs:,}", _percent(module.macs, profile.macs),
        )  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=160, color_system=None, markup=False, highlight=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}" if whole else "0.00"
