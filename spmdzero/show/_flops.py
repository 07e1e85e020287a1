"""The page of a model's profile, arranged like DeepSpeed's print_model_profile."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from spmdzero._display import page_of
from spmdzero.profiling.flops_profiler import ModelProfile, ProfileReport, human
from spmdzero.show._page import Lines, Page, Table

_WIDTH = 78


@page_of.register
def report_page(report: ProfileReport) -> Page:
    """A page with totals, the most expensive classes at each depth, and each module."""
    profile = report.profile
    summary = report.facts | {
        "params per GPU:": human(profile.params),
        "fwd MACs per GPU:": human(profile.macs, "MACs"),
        "fwd flops per GPU:": human(profile.flops),
        "bwd and update flops per GPU:": human(2 * profile.other_macs),
    }
    lines = [
        _rule(" Flops Profiler "),
        *(f"{key:<62}  {value}" for key, value in summary.items()),
        _rule(" Aggregated Profile per GPU "),
        f"Top {report.top_modules} modules in terms of params and MACs at different model depths:",
        *_aggregated(profile, report.module_depth, report.top_modules),
    ]
    if report.detailed:
        lines += [_rule(" Detailed Profile per GPU "), _modules(profile).text()]
    return Page((Lines([*lines, _rule("")]),))


def _rule(title: str) -> str:
    return title.center(_WIDTH, "-")


def _aggregated(profile: ModelProfile, module_depth: int, top: int) -> Iterator[str]:
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


def _modules(profile: ModelProfile) -> Table:
    return Table(
        headers=("module", "class", "params", "% params", "MACs", "% MACs"),
        rows=[
            (
                *(module.name or "(model)", module.kind),
                *(f"{module.params:,}", _percent(module.params, profile.params)),
                *(f"{module.macs:,}", _percent(module.macs, profile.macs)),
            )
            for module in profile.modules
        ],
        numbers=(2, 3, 4, 5),
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}" if whole else "0.00"
