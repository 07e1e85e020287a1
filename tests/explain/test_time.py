"""How long a step takes on a TPU: from a model to the command's exit status."""

import dataclasses
import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero import Explanation, SpmdZeroUsageError
from spmdzero.cli import _explain_job as command
from spmdzero.cli._app import app
from spmdzero.cli._explain import duration
from spmdzero.inspect import CollectiveLedger, read_matmuls
from spmdzero.profiling import backward_scopes, module_scopes, traced_in
from tests.audit.models import config, engine_of

pytestmark = pytest.mark.backends("jax")

WIDTH, ROWS = 256, 64


class Net(nn.Module):
    """Two linear layers after a norm, in a list, and a cross-entropy: [rows, WIDTH] -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device))


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    x = torch.ones(8 * ROWS, WIDTH)
    engine = engine_of(Net(), config(train_micro_batch_size_per_gpu=ROWS))
    return engine.explain(x, tpu=["v5e:2x4"])


def test_a_steps_time_has_modules_of_forward_and_backward(explanation: Explanation) -> None:
    time = explanation.time_on("v5e:2x4")
    assert time.seconds > 0
    for shares in (time.kinds, time.modules):
        assert sum(share.seconds for share in shares) == pytest.approx(time.seconds)
    modules = {share.name for share in time.modules}
    assert {"norm", "layers.0", "layers.1", "", None} <= modules
    kinds = {share.name: share.seconds for share in time.kinds}
    for kind in ("matmul", "normalisation", "loss", "optimizer", "wire"):
        assert kinds[kind] > 0, kind
    assert kinds["kernels"] == kinds["attention"] == 0
    # A forward and two products of each layer's backward, [ROWS, WIDTH] x [WIDTH, WIDTH] a chip.
    assert time.flops == 2 * 3 * 2 * ROWS * WIDTH * WIDTH
    rate = f"{ROWS / time.seconds:,.0f} rows/s a device, {8 * ROWS / time.seconds:,.0f} in all"
    assert rate in str(explanation).splitlines()[0]
    products = [o for o in time.dearest if o.kind == "matmul"]
    assert {o.module for o in products} == {"layers.*"}
    assert 0 < time.exposed <= time.wire * (1 + 1e-9)
    assert time.hidden == pytest.approx(time.wire - time.exposed, abs=1e-12)
    with pytest.raises(SpmdZeroUsageError, match="not known, only on v5e:2x4"):
        explanation.time_on("v6e:2x4")


def test_a_time_is_shown_as_text_as_a_bar_and_reads_back_from_json(
    explanation: Explanation,
) -> None:
    time = explanation.time_on("v5e:2x4")
    text, page = str(explanation), explanation.to_html()
    headline = f"on v5e:2x4: {1e3 * time.seconds:,.3f} ms"
    for shown in (text, page):
        assert headline in shown
        assert "layers.*" in shown
        assert "wire (modelled)" in shown
        # What takes no time is not there.
        assert "kernels (modelled)" not in shown
    drawn = page.partition("5. How long")[2]
    for kind in time.kinds:
        share = kind.seconds / time.seconds
        assert (f"width:{100 * share:.3f}%" in drawn) == (share > 0)
    assert "<script" not in page
    assert "http" not in page.partition("<body>")[2].partition("5. How long")[2]
    read = Explanation.from_json(explanation.to_json())
    assert read == explanation
    assert read.time_on("v5e:2x4").mfu == time.mfu
    # What was written before there were times.
    older = json.loads(explanation.to_json())
    del older["times"]
    assert Explanation.from_json(json.dumps(older)).times == ()


def status(explanation: Explanation, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """The exit status of the command that gets this explanation of its worker."""

    def answered(_: int, __: object) -> Explanation:
        return explanation

    monkeypatch.setattr(command, "_explain_on", answered)
    with pytest.raises(SystemExit) as ended:
        app(["explain", "net:Net", "ds.json", "-b", "8x64", *options])
    return int(ended.value.code or 0)


def test_a_budget_is_an_exit_status_and_a_sentence_for_each_target(
    explanation: Explanation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    milliseconds = 1e3 * explanation.time_on("v5e:2x4").seconds
    on = ("--tpu", "v5e:2x4", "--budget")
    assert status(explanation, monkeypatch, *on, f"{1.01 * milliseconds:.6f}ms") == 0
    said = capsys.readouterr().err
    assert "over budget" not in said
    assert f"within budget: v5e:2x4: a step takes {milliseconds:,.3f} ms of " in said
    assert status(explanation, monkeypatch, *on, f"{milliseconds / 2000:.9f}s") == 1
    said = capsys.readouterr().err
    assert "over budget: v5e:2x4: a step takes " in said
    assert "2.00 x the budget" in said


def test_a_step_that_does_not_fit_is_over_every_budget(explanation: Explanation) -> None:
    assert explanation.over_budget(1e9) == ()
    (line,) = dataclasses.replace(explanation, times=()).over_budget(1e9)
    assert line.startswith("v5e:2x4: ")
    assert "doesn't fit" in line


def test_a_budget_without_a_tpu_or_without_a_unit_is_refused_in_words(
    explanation: Explanation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(explanation, monkeypatch, "--budget", "30ms") == 2
    assert "Add one, such as --tpu v5e:2x4" in capsys.readouterr().err
    assert status(explanation, monkeypatch, "--host-rate", "25") == 2
    assert "--host-rate 25: it counts in the time of a step" in capsys.readouterr().err
    with pytest.raises(SpmdZeroUsageError, match=r"host_rate=25.0: bytes per second"):
        spmdzero.explain(Net(), config(), torch.ones(8, WIDTH), host_rate=25.0)
    assert duration("30ms") == duration("0.03s") == duration("30000us") == pytest.approx(0.03)
    for text in ("30", "ms", "0ms", "-1s", "3 minutes", "1e-3s"):
        with pytest.raises(SpmdZeroUsageError, match="such as 30ms"):
            duration(text)


def traced(scoped: bool) -> tuple[list[Any], list[Any], float]:
    """The collectives, the matrix products, and the loss of a step on this process's devices."""
    torch.manual_seed(0)
    engine = engine_of(Net(), config(train_micro_batch_size_per_gpu=4))
    texts: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(engine.observe(lambda graph: texts.append(graph.hlo())))
        if scoped:
            stack.enter_context(module_scopes(engine.module))
            stack.enter_context(backward_scopes(engine.module))
        loss = engine.train_batch(iter([torch.ones(32, WIDTH)]))
    (hlo,) = texts
    moved = [
        dataclasses.replace(c, op_name="", source="")
        for c in CollectiveLedger.from_hlo(hlo).collectives
    ]
    return moved, list(read_matmuls(hlo)), float(loss)


def test_the_scopes_of_a_backward_name_its_operations_and_change_nothing(mesh: object) -> None:
    moved, products, loss = traced(scoped=True)
    plain, unnamed, same = traced(scoped=False)
    assert (moved, [p.macs for p in products]) == (plain, [p.macs for p in unnamed])
    assert loss == same

    def modules(found: Sequence[Any]) -> list[str | None]:
        return sorted(str(traced_in(product.op_name)) for product in found)

    assert set(modules(unnamed)) == {"None"}
    # A forward and two products of the backward; the first layer's norm wants its gradient too.
    assert modules(products) == ["layers.0"] * 3 + ["layers.1"] * 3
    backward = [p for p in products if "module_backward/" in p.op_name]
    assert len(backward) == 4
