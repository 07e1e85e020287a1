"""The benchmark's section of docs/benchmarks.md."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from harness.report import markdown

from on_tpu import calibration, folder
from on_tpu.cases import CALIBRATION, ROWS, SIZES, TITLES
from on_tpu.reading import Figures, read
from on_tpu.work import model_flops
from spmdzero.explain import StepTime

INTRODUCTION = """\
libtpu compiles for chips that need not be here, and writes into each operation how many cycles it
expects of it. That is no measurement. It is the same count for everybody, so it compares programs.

- **M cycles**: the compiler's, summed over the program, a loop's as often as it turns: arithmetic
  and what waits for memory. Kernels and collectives have none.
- **kernels ms**: Pallas kernels by a model: the larger of their products at the chip's peak, head
  dims padded to the matrix unit's width, and their bytes at the memory's rate. Their exponentials
  and the filling of the units are left out.
- **wire ms**: what the chip waits for transfers, of all that they take: bytes over the rate of all
  links of the chip. One that is only started goes on until another operation ends it, and is
  hidden by those between.
- **step ms**: cycles at the chip's clock, kernels, exposed wire, and what the chip waits for of
  copies from and to its host's memory, at the published rate of PCIe. **ratio**: to spmdzero.
- **calibrated ms**: on the [scale of measured steps](explain.md#a-calibrated-time), with its
  interval. Tables written before 30 November 2026 have no such column.
- **MFU**: the model's arithmetic (three forwards, causal attention half, nothing computed again; of
  images, which are data, the first layer twice) over what the chip could do in that time. **HFU**:
  all products that run, those that are computed again too.
- **peak GiB**: what one chip holds at most, by the compiler. **compile s**: with other compilers
  beside it, which makes it longer.

Nothing of the host counts, nor the start of a program, nor a gather of which the compiler says
nothing. All rows have bf16 weights, fp32 master weights and moments, AdamW, clipping at 1, the same
rows a chip, no dropout. GPT-2 sees 4 rows of 1,024 tokens a chip; Llama's 1 B 4 of 2,048 and
its 8 B 3 of 8,192, its blocks computed again in the backward; Qwen3-MoE 2 of 4,096, likewise; BERT
32 of 512, a target at each; ViT and ResNet 64 images of 224 x 224. All rows of spmdzero are of
JAX's backend, at stage 2; the 8 B and the mixture of experts at stage 3. These two and ViT are
transformers' own modules. Rows of JAX are written for this page: plain is annotated as a tutorial
would, the others are one `shard_map`; as MaxText is ZeRO-3 with layers gathered in a scan."""


def lines(root: Path, names: Sequence[str]) -> Iterator[str]:
    """The tables of the rows of these names, see `folder.row_name`."""
    yield INTRODUCTION
    tables: dict[tuple[str, str], list[Figures]] = {}
    sizes: dict[tuple[str, str], str] = {}
    for name in names:
        row = folder.row_of(root, name)
        if row is not None:
            key = row["case"], row["topology"]
            figures = read(root, row, flops=_flops(row["size"], row["case"]))
            tables.setdefault(key, []).append(figures)
            sizes[key] = row["size"]
    for (case, topology), found in tables.items():
        title = TITLES[case] if sizes[case, topology] == "full" else f"{case}, tiny"
        yield f"\n{title}, {topology}:\n"
        measured = [f for f in found if f.row in CALIBRATION]
        rest = [f for f in found if f.row not in CALIBRATION]
        if rest:
            yield _table(rest)
            yield from _beside_the_best(rest)
        if measured:
            yield from calibration.lines(measured, _quickest(rest, "ours"))
        if case == "llama-8b" and sizes[case, topology] == "full":
            yield from calibration.of_8b(rest, _quickest(rest, "ours"))


@cache
def _flops(size: str, case: str) -> float:
    return model_flops(SIZES[size][case])


def _table(found: Sequence[Figures]) -> str:
    own = next((f.time.seconds for f in found if f.row == "ours" and f.time), None)
    rows = [_row(figures, own) for figures in found]
    titles = [
        "",
        "step ms",
        "calibrated ms",
        "ratio",
        "M cycles",
        "kernels ms",
        "wire ms exposed of all",
    ]
    return markdown([*titles, "MFU", "HFU", "peak GiB", "compile s", "date, libtpu"], rows)


def _row(figures: Figures, own: float | None) -> list[str]:
    title, time = ROWS[figures.row].title, figures.time
    if time is None:
        return [title, figures.problem, *[""] * 10]
    return [
        title,
        f"{1e3 * time.seconds:.2f}",
        _calibrated(time),
        f"{time.seconds / own:.2f}" if own else "",
        f"{time.cycles / 1e6:.1f}",
        f"{1e3 * time.kernels:.2f}",
        f"{1e3 * time.exposed:.2f} of {1e3 * time.wire:.2f}",
        time_share(figures.mfu),
        time_share(time.hfu),
        f"{(figures.peak or 0) / 2**30:.2f}",
        f"{figures.compile_seconds:.0f}",
        figures.compiled,
    ]


def _calibrated(time: StepTime) -> str:
    found = time.calibrated
    return (
        f"{1e3 * found.seconds:.0f} ({1e3 * found.low:.0f} to {1e3 * found.high:.0f})"
        if found
        else ""
    )


def time_share(share: float) -> str:
    """A share of a whole, as the tables show it."""
    return f"{100 * share:.1f} %"


def _beside_the_best(found: Sequence[Figures]) -> Iterator[str]:
    """Where the time goes, in our quickest row and in the quickest by hand."""
    own, best = _quickest(found, "ours"), _quickest(found, "jax")
    if own is None or own.time is None or best is None or best.time is None:
        return
    yield (
        f"\nMilliseconds by kind of operation: spmdzero's quickest row, {ROWS[own.row].title!r}, "
        f"beside JAX's,\n{ROWS[best.row].title!r}:\n"
    )
    rows = _kinds(own.kinds, best.kinds)
    yield markdown(["", "spmdzero", "JAX", "difference"], rows)
    ahead = best.time.seconds / own.time.seconds - 1
    yield f"\nspmdzero is {abs(100 * ahead):.0f} % {'ahead of' if ahead >= 0 else 'behind'} it."


def _quickest(found: Sequence[Figures], who: str) -> Figures | None:
    """The row of the least time among those whose names begin so."""
    timed = [f for f in found if f.row.startswith(who) and f.time]
    return min(timed, key=lambda f: f.time.seconds if f.time else 0.0, default=None)


def _kinds(own: Mapping[str, float], best: Mapping[str, float]) -> list[list[str]]:
    rows = []
    for kind in own:
        a, b = 1e3 * own[kind], 1e3 * best.get(kind, 0.0)
        if max(a, b) >= 0.005:
            rows.append([kind, f"{a:.2f}", f"{b:.2f}", f"{a - b:+.2f}"])
    return rows
