"""Each finding has a model that provokes it; a sound model has none."""

import pytest
import torch
import torch.nn.functional as F

import spmdzero
from spmdzero.backend import current
from spmdzero.plan import Role
from tests.audit.models import (
    GLOBAL,
    HIDDEN,
    ROWS,
    WIDTH,
    AnyWidth,
    GrowsByItself,
    MixesRows,
    NoNorm,
    ReadsValue,
    RunsOnCpu,
    Sound,
    audit_loop,
    batches,
    config,
    engine_of,
    names,
)
from tests.support.engines import ask_never

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    "cfg",
    [
        config(),
        config(stage=1, gas=3),
        config(stage=0),
        config(**GLOBAL),
        config(**BF16, gradient_clipping=0.5),
        config(spmd={"reduction": "explicit"}, **BF16),
    ],
    ids=["stage 2", "stage 1, three micro-batches", "stage 0", "global", "bf16", "explicit bf16"],
)
def test_nothing_is_found_in_a_sound_model(cfg: dict) -> None:
    engine = engine_of(NoNorm() if cfg.get("spmd") == {"forward": "global"} else Sound(), cfg)
    dtype = torch.bfloat16 if "bf16" in cfg else torch.float32
    count = 3 * engine.gradient_accumulation_steps()
    report = spmdzero.audit(engine, batches(count, dtype))
    assert report.findings == ()
    assert report.steps == 3
    assert engine.global_steps == 3
    report.strict()


def test_nothing_is_found_at_stage_3_where_a_device_holds_an_eighth() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    cfg = config(spmd={"min_shard_elements": 1}, **BF16) | {"zero_optimization": zero}
    engine = engine_of(Sound(), cfg)
    report = spmdzero.audit(engine, batches(3, torch.bfloat16))
    assert report.findings == ()
    held, planned = spmdzero.measure(engine), engine.plan.memory()
    whole = sum(p.numel() * p.element_size() for p in engine.module.parameters())
    assert held[Role.PARAMETER] == planned[Role.PARAMETER] == whole // 8


def test_a_layer_that_mixes_rows_is_a_stray_collective_with_module_and_operation() -> None:
    report = spmdzero.audit(engine_of(MixesRows(), config(**GLOBAL)), batches(2))
    found = {finding.subject: finding for finding in report.of("stray-activation-collective")}
    mixed = found["aten::mm in module mixed"]
    assert "aten::mm in the backward pass or outside of the model" in found
    assert mixed.severity == "error"
    # Of the same tensor newer JAX gathers the transpose.
    shapes = (f"[{ROWS}, {HIDDEN}]", f"[{HIDDEN}, {ROWS}]")
    assert any(f"all-gather f32{shape};" in mixed.evidence for shape in shapes)
    assert '"forward": "region"' in mixed.fix


# torch_xla writes a layer norm as a batch norm of rows that it mixes. JAX keeps rows apart.
LAYER_NORM = {
    "torch_xla": [
        "aten::native_batch_norm in module norm",
        "aten::native_batch_norm_backward in the backward pass or outside of the model",
    ],
    "jax": [],
}


def test_a_layer_norm_leaks_in_torch_xlas_global_forward_only() -> None:
    report = spmdzero.audit(engine_of(Sound(), config(**GLOBAL)), batches(2))
    assert {f.name for f in report.findings} <= {"stray-activation-collective"}
    assert [f.subject for f in report.findings] == LAYER_NORM[current().name]
    for finding in report.findings:
        assert f"all-gather f32[1, {ROWS}, {HIDDEN}]" in finding.evidence


def test_a_loss_that_mixes_rows_outside_of_the_model_is_a_stray_collective() -> None:
    class Output(Sound):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.norm(self.a(x)))

    engine = engine_of(Output(), config())
    with spmdzero.auditing(engine) as audit:
        for x in batches(2):
            output = engine(x)
            engine.backward((output @ output.T).square().mean())
            engine.step()
    found = audit.report.of("stray-activation-collective")
    assert found
    assert all("outside of the model" in f.subject for f in found)


def test_gradients_of_bf16_reduced_in_fp32_are_a_wide_dtype() -> None:
    engine = engine_of(Sound(), config(communication_data_type="fp32", **BF16))
    report = spmdzero.audit(engine, batches(2, torch.bfloat16))
    (finding,) = report.findings
    assert finding.name == "wide-dtype"
    assert "bf16 parameters' gradients are reduced in f32" in finding.cause
    assert "communication_data_type" in finding.fix
    assert "6 collectives" in finding.evidence


def test_large_states_that_the_config_replicates_are_found_with_their_bytes() -> None:
    engine = engine_of(Sound(), config(spmd={"min_shard_elements": 100_000}))
    report = spmdzero.audit(engine, batches(2))
    assert set(names(report)) == {"replicated-large-state"}
    assert sorted(f.subject for f in report.findings) == [
        "exp_avg, exp_avg_sq of a.weight",
        "exp_avg, exp_avg_sq of b.weight",
    ]
    # Two moments of 8,192 fp32 elements.
    assert "65,536 bytes instead of 8,192" in report.findings[0].evidence
    assert "min_shard_elements" in report.findings[0].cause


def test_a_parameter_that_is_assigned_a_sharded_value_has_drifted() -> None:
    def decay(engine: spmdzero.Engine, _: torch.Tensor) -> None:
        weight = engine.module.a.weight
        weight.data = weight.data - 0.1 * engine.optimizer.state[weight]["exp_avg"]

    report = audit_loop(engine_of(Sound(), config()), after=decay)
    (drift,) = report.of("parameter-drift")
    assert drift.subject == "a.weight"
    assert f"[{HIDDEN // 8}, {WIDTH}] of [{HIDDEN}, {WIDTH}]" in drift.evidence


# JAX's backend gives away whatever no tensor holds any more, whichever tensor comes after it.
@pytest.mark.backends("torch_xla")
def test_a_state_that_is_replaced_each_step_is_not_donated() -> None:
    def cool(engine: spmdzero.Engine, _: torch.Tensor) -> None:
        state = engine.optimizer.state[engine.module.a.weight]
        state["exp_avg"] = state["exp_avg"] * 0.9

    engine = engine_of(Sound(hidden=96), config())
    spmdzero.audit(engine, batches(2))
    sound = engine.donated_inputs["boundary"]
    report = audit_loop(engine, after=cool)
    (finding,) = report.of("missing-donation")
    assert finding.subject == "exp_avg/a.weight"
    # One input fewer is reused, by torch_xla's own count.
    assert f"reuses {sound - 1} of its" in finding.evidence


def test_a_state_that_is_written_in_place_is_donated(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_never(monkeypatch)

    def cool(engine: spmdzero.Engine, _: torch.Tensor) -> None:
        engine.optimizer.state[engine.module.a.weight]["exp_avg"].mul_(0.9)

    report = audit_loop(engine_of(Sound(), config()), steps=3, after=cool)
    assert report.of("missing-donation") == ()


class TestRecompilation:
    def test_another_width_is_named_with_both_shapes(self) -> None:
        data = [x[:, :width] for x, width in zip(batches(4), (64, 64, 48, 32), strict=True)]
        report = spmdzero.audit(engine_of(AnyWidth(), config()), data)
        (finding,) = report.findings
        assert finding.name == "recompilation"
        assert finding.subject == "the program of a step's last micro-batch"
        assert "input 'x': float32[8, 64] -> float32[8, 48]" in finding.cause
        assert finding.evidence == "2 programs compiled again, at step 2, 3"

    def test_the_modules_mode_is_named(self) -> None:
        class Noisy(Sound):
            def middle(self, hidden: torch.Tensor) -> torch.Tensor:
                return F.dropout(self.norm(hidden), 0.1, self.training)

        engine = engine_of(Noisy(hidden=72), config())
        report = audit_loop(engine, after=lambda engine, _: engine.eval())
        assert [f.cause for f in report.findings] == ["the module is in eval mode"]

    def test_another_graph_of_the_same_inputs_is_laid_at_the_models_door(self) -> None:
        report = spmdzero.audit(engine_of(GrowsByItself(), config()), batches(3))
        (finding,) = report.findings
        assert finding.name == "recompilation"
        assert "the inputs were the same" in finding.cause
        assert finding.evidence == "2 programs compiled again, at step 1, 2"


class TestHost:
    @pytest.mark.backends("torch_xla")  # JAX lowers an operation or refuses it, in words.
    def test_a_fallback_is_named_with_its_line_and_does_not_count_as_a_read(self) -> None:
        report = spmdzero.audit(engine_of(RunsOnCpu(), config(**GLOBAL)), batches(2))
        found = report.of("cpu-fallback")
        assert [f.subject.split(" at ")[0] for f in found] == ["aten::i0", "aten::special_i1"]
        assert "models.py" in found[0].subject
        assert "in the model" in found[0].subject
        assert report.of("host-read-in-step") == ()

    @pytest.mark.parametrize("spmd", [{}, GLOBAL], ids=["region", "global"])
    def test_a_value_read_in_the_forward_is_named_with_its_line(self, spmd: dict) -> None:
        report = spmdzero.audit(engine_of(ReadsValue(), config(**spmd)), batches(3))
        (finding,) = report.of("host-read-in-step")
        assert "models.py" in finding.subject
        assert "in the model" in finding.subject
        assert finding.evidence.startswith("3 transfers from the devices in 3 steps")

    def test_a_loss_read_at_each_step_is_named_with_the_scripts_line(self) -> None:
        report = audit_loop(engine_of(Sound(), config()), after=lambda _, loss: loss.item())
        (finding,) = report.findings
        assert finding.name == "host-read-in-step"
        assert finding.subject.startswith(__file__)

    def test_a_loss_read_once_in_a_while_and_what_the_config_lets_the_engine_read_are_not(
        self,
    ) -> None:
        def now_and_then(engine: spmdzero.Engine, loss: torch.Tensor) -> None:
            if engine.global_steps == 2:
                loss.item()

        engine = engine_of(Sound(), config(spmd={"check_finite": True}))
        assert audit_loop(engine, steps=3, after=now_and_then).findings == ()
