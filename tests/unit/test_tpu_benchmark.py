"""The benchmark of steps on a TPU: what it counts, and one whole run of it. No time is asserted."""

import dataclasses
import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.backends("any")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# The benchmark is a script, not an installed package.
sys.path.insert(0, str(BENCHMARKS))

import searched  # noqa: E402
import tpu  # noqa: E402
from on_tpu import cases, folder, reading, search, section, torch_models  # noqa: E402
from on_tpu.cases import CASES, TINY  # noqa: E402
from on_tpu.work import model_flops  # noqa: E402

KEPT = Path(__file__).with_name("tpu_programs")
"""A tiny GPT of JAX's, its layers in a loop, as libtpu 0.0.21 compiled it for v5e:2x4."""
ROW = "tiny.gpt2.v5e-2x4.jax-scan"


# -- what is counted ------------------------------------------------------------------------


def test_the_models_have_the_size_of_their_names() -> None:
    # Their makers' counts, in millions; GPT's head is a matrix of its own here, 38.6 M.
    sizes = {
        "gpt2": 124.4 + 38.6,
        "llama-2k": 1235.8,
        "llama-8b": 8030.3,
        "llama-8b-7x": 8030.3,
        "llama-70b": 70553.7,
        "llama-405b": 405853.4,
        "mistral-7b": 7241.7,
        # The whole has 30,532.1 in 48 layers.
        "qwen3-moe": (30532.1 - 2 * 151.936 * 2.048) * 12 / 48 + 2 * 151.936 * 2.048,
        "qwen3-235b": 235093.6,
        "bert": 109.5,
        "vit": 86.6,
        "resnet": 25.6,
    }
    for name, millions in sizes.items():
        model = torch_models.build(CASES[name], fused_loss=False)
        counted = sum(p.numel() for p in model.parameters()) / 1e6
        # BERT's pooler and token types are left out, its head's transform is in.
        assert counted == pytest.approx(millions, rel=0.005), name


def test_the_arithmetic_of_a_model_is_the_papers() -> None:
    # 6 operations for each weight of a product and token, and 6 x width for each pair of tokens
    # that attention sees, of each layer (arXiv 2204.02311, appendix B).
    for name in ("gpt2", "llama-2k", "llama-8b", "bert"):
        case = CASES[name]
        kv = case.width * case.kv_heads // case.heads
        if case.model == "llama":
            layer = 2 * case.width * (case.width + kv) + 3 * case.width * case.inner
        else:
            layer = 4 * case.width**2 + 2 * case.width * case.inner
        weights = case.layers * layer + case.vocabulary * case.width
        if case.model == "bert":
            weights += case.width**2
        seen = case.length / (1 if case.model == "bert" else 2)
        a_token = 6 * weights + 12 * case.layers * case.width * seen
        assert model_flops(case) == pytest.approx(case.tokens * a_token, rel=1e-6), name
    # Of experts those count that a token goes through, 8 of 128; a vision transformer's forward has
    # 17.58 billion multiplications and additions an image, its paper's, of attention too.
    moe = CASES["qwen3-moe"]
    everything = sum(p.numel() for p in torch_models.build(moe, fused_loss=False).parameters())
    idle = 120 * 3 * moe.width * moe.inner * moe.layers + moe.vocabulary * moe.width
    pairs = 6 * moe.layers * moe.heads * moe.size * moe.length
    assert model_flops(moe) == pytest.approx(
        moe.tokens * (6 * (everything - idle) + pairs), rel=1e-3
    )
    assert model_flops(CASES["vit"]) == pytest.approx(64 * 3 * 2 * 17.58e9, rel=0.01)
    # 4.09 billion multiplications and additions an image in its forward.
    # The first convolution's input is data: 147 multiplications a place need no gradient.
    of_images = 64 * 2 * 64 * 112**2 * 147
    assert model_flops(CASES["resnet"]) == pytest.approx(64 * 3 * 2 * 4.09e9 - of_images, rel=0.002)


def test_nothing_that_is_computed_again_is_the_models_arithmetic() -> None:
    case = TINY["llama-2k"]
    assert case.recompute
    assert model_flops(case) == model_flops(dataclasses.replace(case, recompute=False))


# -- what is read ---------------------------------------------------------------------------


def kept(**changes: object) -> dict[str, object]:
    row = folder.row_of(KEPT, ROW)
    assert row is not None
    return {**row, **changes}


def test_a_rows_cycles_are_those_of_the_text_and_a_loops_count_as_often_as_it_turns() -> None:
    hlo = gzip.decompress((KEPT / "programs" / "tiny" / "hlo.gz").read_bytes()).decode()
    computations = dict(re.findall(r"^(?:ENTRY )?%(\S+) .*?\{\n(.*?)^\}", hlo, re.M | re.S))
    entry = re.search(r"^ENTRY %(\S+)", hlo, re.M)
    assert entry is not None

    def cycles(name: str) -> int:
        return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', computations[name])))

    # Forward and backward go through all layers, one a turn.
    loops = re.findall(r" while\(.*body=%([\w.\-]+)", hlo)
    assert len(loops) == 2
    turns = TINY["gpt2"].layers
    figures = reading.read(KEPT, kept(), flops=1e9)
    assert figures.time is not None
    assert figures.time.cycles == cycles(entry[1]) + turns * sum(map(cycles, loops))
    assert figures.time.kernels > 0
    assert sum(figures.kinds.values()) == pytest.approx(figures.time.seconds)
    assert figures.mfu == pytest.approx(1e9 / figures.time.seconds / 197e12)
    result = json.loads((KEPT / "programs" / "tiny" / "result").read_text())
    assert figures.peak == result["peak"]


def test_a_row_without_figures_says_why(tmp_path: Path) -> None:
    shutil.copytree(KEPT, tmp_path, dirs_exist_ok=True)
    assert reading.read(tmp_path, kept(failed="no"), flops=1.0).problem == (
        "could not be traced: no"
    )
    assert reading.read(tmp_path, kept(programs=["other"]), flops=1.0).problem == (
        "not compiled yet"
    )
    result = tmp_path / "programs" / "tiny" / "result"
    said = "RESOURCE_EXHAUSTED: Used 20.51G of 15.75G hbm. Exceeded hbm capacity by 4.76G."
    result.write_text(json.dumps({"exhausted": said, "seconds": 3.0}))
    assert reading.read(tmp_path, kept(), flops=1.0).problem == "doesn't fit: 20.51 GiB"
    result.write_text(json.dumps({"failed": "status 1: no such flag", "seconds": 3.0}))
    assert reading.read(tmp_path, kept(), flops=1.0).problem == "status 1: no such flag"


def test_a_table_has_each_row_that_was_prepared() -> None:
    lines = "\n".join(section.lines(KEPT, [ROW, "tiny.gpt2.v5e-2x4.ours"])).splitlines()
    rows = [line for line in lines if line.startswith("| JAX")]
    assert len(rows) == 1
    assert not [line for line in lines if line.startswith("| spmdzero")]
    assert re.search(r"\| \d+\.\d\d of \d+\.\d\d \| \d+\.\d % \| \d+\.\d % \|", rows[0])


def test_every_row_of_a_table_is_known_and_steps_that_others_measured_have_one_table() -> None:
    assert set(cases.TABLES) == set(cases.CASES) == set(cases.TINY) == set(cases.TITLES)
    assert {name for case in cases.CASES for name in cases.rows_of(case)} == (
        set(cases.ROWS) | set(cases.CALIBRATION)
    )
    measured = {name for name in cases.rows_of(cases.CALIBRATED) if name.startswith("measured")}
    assert measured == set(cases.CALIBRATION)
    assert not measured & set(cases.rows_of("gpt2"))


def test_what_a_search_stands_beside_is_a_row_or_a_file_that_is_there() -> None:
    for title, asked in searched.SEARCHES.items():
        assert asked.case in cases.CASES, title
        for written in asked.by_hand.values():
            assert written in cases.ROWS or (search.JSONS / written).is_file(), written


# -- whole runs -----------------------------------------------------------------------------


@pytest.mark.slow
def test_prepared_programs_are_compiled_once_and_read(tmp_path: Path) -> None:
    which = list(tpu.asked(["llama-8b"], ["v6e:2x4"], ["ours-scan", "jax-scan"]))
    tpu.prepare(tmp_path, "tiny", which)
    tpu.compile_(tmp_path, "tiny", which, jobs=2, timeout=600)
    programs = tmp_path / "programs"
    written = {path: path.stat().st_mtime_ns for path in programs.glob("*/result")}
    assert len(written) == 2
    tpu.compile_(tmp_path, "tiny", which, jobs=2, timeout=600)
    assert written == {path: path.stat().st_mtime_ns for path in programs.glob("*/result")}
    # Nothing is traced again either.
    rows = {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").iterdir()}
    tpu.prepare(tmp_path, "tiny", which)
    assert rows == {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").iterdir()}
    table = "\n".join(tpu.read(tmp_path, "tiny", which))
    assert "beside JAX's" in table
    told = [line for line in table.splitlines() if line.startswith(("| with its", "| JAX"))]
    assert len(told) == 2
    assert all("%" in line for line in told)


@pytest.mark.slow
def test_steps_by_hand_have_as_many_weights_as_the_models() -> None:
    # In a process of its own: JAX's XLA and torch_xla's can't share one.
    program = """
import json, math
from on_tpu.by_hand import Way, _shapes
from on_tpu.cases import CASES

def counted(case):
    return [sum(map(math.prod, _shapes(case, Way(scan=s))[0].values())) for s in (False, True)]

print(json.dumps({name: counted(case) for name, case in CASES.items()}))
"""
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=BENCHMARKS, capture_output=True, text=True, check=True
    )
    for name, counted in json.loads(said.stdout).items():
        model = torch_models.build(CASES[name], fused_loss=False)
        assert counted == [sum(p.numel() for p in model.parameters())] * 2, name
