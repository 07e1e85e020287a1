"""A TPU program's schedule and its time, read from text that libtpu 0.0.21 wrote.

`v6e_2x4_scan_splash.txt` is a JAX program for v6e:2x4, a scan of 4 transformer blocks with splash
attention, 8 heads of 128 over 1,024 tokens a chip, forward and backward, compiled with the flags of
asynchronous collective fusion; cut to what the readers read (layouts, sources and the kernels' code
are gone). `v5e_2x4_stage2_bf16.txt` and `tpu7x_2x2x1_stage2_bf16.txt` are those of
test_ledger_tpu.py.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from spmdzero.backend import Work
from spmdzero.explain import CHIPS, step_time
from spmdzero.explain._kernels import kernel_cost
from spmdzero.explain._timeline import timeline
from spmdzero.hlo import Operation, each_operation, parse, read_matmuls, read_schedule
from spmdzero.inspect import CollectiveLedger

pytestmark = pytest.mark.backends("any")

DATA = Path(__file__).parents[1] / "data/hlo"
V6E = CHIPS["v6e"]
LAYERS = 4


def text(name: str = "v6e_2x4_scan_splash") -> str:
    return (DATA / f"{name}.txt").read_text()


def cycles_of(hlo: str) -> dict[str, int]:
    """Computation -> the sum of all estimates in it, by the text alone."""
    found = {}
    for block in re.finditer(r"^(?:ENTRY )?%([\w.\-]+) \(.*?^\}", hlo, re.DOTALL | re.MULTILINE):
        found[block[1]] = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', block[0])))
    return found


def kernels() -> dict[str, Operation]:
    found = (o for o, _ in each_operation(read_schedule(text())) if o.kernel is not None)
    return {re.sub(r"_block.*", "", o.name): o for o in found}


def test_every_estimate_counts_once_and_a_loops_as_often_as_it_turns() -> None:
    hlo = text()
    schedule = read_schedule(hlo)
    module, by_computation = parse(hlo), cycles_of(hlo)
    bodies = re.findall(r"\bbody=%([\w.\-]+)", hlo)
    assert [o.trips for o in schedule if o.bodies] == [LAYERS, LAYERS]
    inside = sum(by_computation[name] for name in bodies)
    assert inside > by_computation[module.entry] > 0
    # Nothing but the entry and the loops has estimates.
    assert sum(by_computation.values()) == inside + by_computation[module.entry]
    counted = sum(runs * (o.cycles or 0) for o, runs in each_operation(schedule))
    assert counted == by_computation[module.entry] + LAYERS * inside


def test_a_loops_products_count_as_often_as_it_turns() -> None:
    # Matrices of 3 + 1 + 4 + 4 times 1,024 x 1,024: 12 in the forward, twice that in the backward,
    # which recomputes all but the last, of whose result it needs nothing. By 1,024 tokens.
    macs = sum(m.macs for m in read_matmuls(text(), exact=True))
    assert macs == LAYERS * (12 + 24 + 8) * 1024**3


def test_a_batched_product_counts_without_the_zeros_that_libtpu_puts_between_its_rows() -> None:
    # What libtpu makes of [16, 1024, 64] x [16, 1024, 64] -> [16, 1024, 1024] for v5e.
    hlo = """HloModule m, num_partitions=1
ENTRY %e (l: bf16[16,1024,64], r: bf16[16,1024,64]) -> bf16[16,1024,1024] {
  %l = bf16[16,1024,64] parameter(0)
  %r = bf16[16,1024,64] parameter(1)
  ROOT %c = bf16[16,1024,1024] convolution(%l, %r), window={size=16 stride=15 lhs_dilate=16}, \
dim_labels=0bf_0oi->0bf
}
"""
    (exact,), (padded,) = read_matmuls(hlo, exact=True), read_matmuls(hlo)
    assert exact.macs == 16 * 1024 * 1024 * 64
    assert padded.macs == 16 * exact.macs


def test_a_transfer_that_is_fused_with_compute_counts_once_and_is_hidden_by_it() -> None:
    hlo = text()
    started = [o for o, _ in each_operation(read_schedule(hlo)) if o.asynchronous and o.wire_bytes]
    # Each chain stands in the text as start, steps and end.
    assert hlo.count('frontend_attributes={chain_id="') == 12
    assert [o.name for o in started] == [f"async-collective-start{n}" for n in (".2", "", ".1")]
    ledger = CollectiveLedger.from_hlo(hlo)
    assert sum(c.asynchronous for c in ledger.collectives) == len(started)
    spent = timeline(read_schedule(hlo), V6E)
    ends = [s for s in spent if s.operation.ends in {o.name for o in started}]
    assert len(ends) == len(started)
    # 7.3 MB take 16 us, and the products between take longer.
    assert all(s.waiting == 0 for s in ends)
    exposed = sum(s.runs * s.waiting for s in spent)
    assert exposed == pytest.approx(
        sum(s.runs * s.transfer for s in spent if not s.operation.asynchronous), rel=1e-9
    )


def test_transfers_on_one_channel_have_their_own_names_and_ends() -> None:
    # libtpu gives transfers of equal shape one channel, and each its own chain.
    hlo = re.sub(r'channel_id=\d+(.*chain_id=")', r"channel_id=1\1", text())
    assert hlo.count("channel_id=1,") == 12
    # The fusion that ends a transfer has the name under which it was traced.
    ends = re.compile(r'(%(async-collective-done\S*) = .*op_name=)"[^"]*"')
    ledger = CollectiveLedger.from_hlo(ends.sub(r'\1"zero.parameter/\2.0/all_gather"', hlo))
    names = [f"async-collective-done{n}" for n in ("", ".1", ".2")]
    assert sorted(c.tensor for c in ledger.of_role("parameter")) == names
    apart, together = (
        [(o.name, o.ends) for o, _ in each_operation(read_schedule(each)) if o.ends]
        for each in (text(), hlo)
    )
    assert together == apart


def test_a_transfer_is_exposed_for_as_long_as_nothing_runs_meanwhile() -> None:
    # The same schedule on a chip whose links are 100 times slower hides what compute it has.
    hlo = text()
    slow = V6E.__class__(**{**vars(V6E), "ici_rate": V6E.ici_rate / 100})
    fast, waits = (step_time([(hlo, 1)], chip, target="v6e:2x4") for chip in (V6E, slow))
    assert waits.wire == pytest.approx(100 * fast.wire)
    assert waits.compiled == fast.compiled
    assert 0 < fast.hidden < waits.hidden < fast.compiled + fast.kernels
    assert waits.seconds == pytest.approx(waits.compiled + waits.kernels + waits.exposed)


def test_an_attention_kernels_time_is_that_of_its_products() -> None:
    found = kernels()
    assert set(found) == {"splash_mha_fwd_residuals", "splash_mha_dq", "splash_mha_dkv"}
    product = 2 * 8 * 1024 * 1024 * 128
    counts = {"splash_mha_fwd_residuals": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
    for name, operation in found.items():
        assert operation.cycles is None
        cost = kernel_cost(operation, V6E)
        assert cost.flops == counts[name] * product
        # v6e's matrix units are 256 wide: a head dim of 128 leaves half of them idle.
        assert cost.seconds == pytest.approx(2 * cost.flops / V6E.bf16_flops)
        assert kernel_cost(operation, CHIPS["v5e"]).seconds == pytest.approx(
            cost.flops / CHIPS["v5e"].bf16_flops
        )


def test_blocks_that_a_causal_mask_hides_whole_cost_nothing() -> None:
    for name, operation in kernels().items():
        whole = kernel_cost(operation, V6E).flops
        causal = replace(operation, op_names=("causal", *operation.op_names))
        # Of 8 x 8 blocks, by the kernels' names, 36 are seen.
        assert kernel_cost(causal, V6E).flops == pytest.approx(whole * 36 / 64), name


def test_blocks_that_a_window_hides_whole_cost_nothing() -> None:
    for name, operation in kernels().items():
        whole = kernel_cost(operation, V6E).flops
        # A block of 128 queries sees its own keys and, from the first query on, 200 before it.
        near = replace(operation, op_names=("attention.forward.causal.window200/",))
        assert kernel_cost(near, V6E).flops == pytest.approx(whole * (1 + 2 + 6 * 3) / 64), name
        both = replace(operation, op_names=("attention.forward.window129/",))
        assert kernel_cost(both, V6E).flops == pytest.approx(whole * (2 + 6 * 3 + 2) / 64), name


def test_a_newer_kernel_says_its_blocks_in_lines_of_their_own() -> None:
    # Of what jax 0.12.0 and libtpu 0.0.50.1 made of causal attention, [8, 1024, 128].
    array, said = "bf16[8,1024,128]{2,1,0}", r"{\"block_q\": 128, \"block_kv\": 256}"
    hlo = f"""HloModule m, is_scheduled=true

ENTRY %e (q: {array}, k: {array}, v: {array}) -> {array} {{
  %q = {array} parameter(0)
  %k = {array} parameter(1)
  %v = {array} parameter(2)
  %splash_mha_fwd_residuals.1 = ({array}, f32[8,1024]{{1,0}}) custom-call(%q, %k, %v), \
custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{said}"
}}}}, metadata={{op_name="jit(run)/attention.forward.causal/pallas_call" stack_frame_id=69}}
  ROOT %out = {array} get-tuple-element(%splash_mha_fwd_residuals.1), index=0, \
frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{said}"
}}}}, metadata={{op_name="jit(run)/attention.forward.causal/pallas_call" stack_frame_id=69}}
}}
"""
    (operation,) = [o for o, _ in each_operation(read_schedule(hlo)) if o.kernel]
    assert operation.op_names == ("jit(run)/attention.forward.causal/pallas_call",)
    # Of 8 x 4 blocks 2 x (1 + 2 + 3 + 4) are seen.
    assert kernel_cost(operation, V6E).flops == 2 * 2 * 8 * 1024 * 1024 * 128 * 20 / 32


def test_what_a_kernels_author_counted_goes_before_the_model() -> None:
    hlo = re.sub(
        r'custom_call_target="tpu_custom_call"',
        'custom_call_target="tpu_custom_call", backend_config={"custom_call_config":'
        '{"cost_estimate":{"flops":918000000000,"transcendentals":0,"bytes_accessed":1}}}',
        text(),
    )
    found = [o for o, _ in each_operation(read_schedule(hlo)) if o.kernel is not None]
    # 918 GFLOP at 918 TFLOP/s.
    assert [kernel_cost(o, V6E).seconds for o in found] == pytest.approx([1e-3] * len(found))


def test_a_steps_time_is_the_sum_of_its_kinds_and_of_its_modules() -> None:
    once, thrice = (
        step_time([(text(), n)], V6E, target="v6e:2x4", work=Work(flops=n * 1e9)) for n in (1, 3)
    )
    for time in (once, thrice):
        for shares in (time.kinds, time.modules):
            assert sum(s.seconds for s in shares) == pytest.approx(time.seconds)
    assert thrice.seconds == pytest.approx(3 * once.seconds)
    assert thrice.hfu == pytest.approx(once.hfu)
    assert 0 < once.hfu < 1
    assert thrice.mfu == pytest.approx(once.mfu)
    assert once.mfu == pytest.approx(1e9 / once.seconds / V6E.bf16_flops)
    kinds = {kind.name: kind for kind in once.kinds}
    assert kinds["kernels"].operations == 4 * LAYERS
    assert kinds["kernels"].seconds == pytest.approx(once.kernels)
    assert kinds["wire"].seconds == pytest.approx(once.exposed)
    assert [o.seconds for o in once.dearest] == sorted(o.seconds for o in once.dearest)[::-1]
    assert {o.modelled for o in once.dearest if o.kind in ("kernels", "wire")} == {True}


@pytest.mark.parametrize(
    ("name", "clock"),
    [("v4", 1.05e9), ("v5e", 1.5e9), ("v5p", 1.75e9), ("v6e", 1.75e9), ("tpu7x", 2.2e9)],
)
def test_a_chips_clock_follows_from_its_peak_and_its_matrix_units(name: str, clock: float) -> None:
    # v4 runs at 1,050 MHz (arXiv 2304.01433, table 4); of v5p and later nothing is published.
    assert CHIPS[name].clock == pytest.approx(clock, rel=3e-3)


def test_a_time_is_drawn_as_one_bar_with_a_legend_and_as_lines() -> None:
    time = step_time([(text(), 1)], V6E, target="v6e:2x4")
    drawn, lines = time._repr_html_(), str(time)
    assert "<script" not in drawn
    for kind in time.kinds:
        # What would be written as 0.000 ms has neither a part of the bar nor a line.
        shown = kind.seconds >= 0.5e-6
        assert (f"width:{100 * kind.seconds / time.seconds:.3f}%" in drawn) == shown, kind
        assert (f"\n {kind.name} " in lines) == shown, kind
    assert any(kind.seconds < 0.5e-6 for kind in time.kinds)
    # Of the same length as the shares are, the longest 40.
    (longest,) = {line.count("█") for line in lines.splitlines() if " matmul " in line} - {0}
    assert longest == 40 == max(line.count("█") for line in lines.splitlines())
    assert "wire (modelled)" in lines
    # Where they come from, without the folders of the machine that compiled.
    assert "pallas_call" in lines


def test_a_transfer_of_a_sparse_core_goes_on_from_its_operand_to_its_end() -> None:
    hlo = text("tpu7x_2x2x1_stage2_bf16")
    started = {o.name: o for o in read_schedule(hlo) if o.asynchronous and o.wire_bytes}
    sent = [2 * n * 7 // 8 for n in (4096 * 512, 4096 * 512, 4096, 4096 * 512, 4096 * 512)]
    assert [o.wire_bytes for o in started.values()] == sent
    assert {o.ends for o in read_schedule(hlo)} >= {*started}
    time = step_time([(hlo, 1)], CHIPS["tpu7x"], target="tpu7x:2x2x1")
    assert time.wire == pytest.approx(sum(sent) / 300e9, rel=1e-2)
    assert 0 < time.hidden < time.wire
