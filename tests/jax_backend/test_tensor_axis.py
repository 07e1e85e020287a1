"""The mesh axis tensor: devices that share a replica's work by the placements of weights."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from spmdzero.utils import safe_set_full_grad
from torch import nn

import spmdzero
from spmdzero.backend import arrays
from spmdzero.config import load_config
from spmdzero.engine._tensor_axis import tensor_dims
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.explain._moves import ProgramLedger, measure_moves
from spmdzero.plan import MeshSpec, Role
from tests.engine.test_overflow_tables import FINE, GRADIENTS, SCALES, SKIPPED
from tests.support.deepspeed import run_ranks

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, WIDTH, WORDS = 8, 32, 128, 256
# Sums over parts of a dim are rounded otherwise than sums over the whole: by a few units of fp32's
# last place. Adam divides gradients near zero by their own size, so that after some steps weights,
# and with them the norm of the gradient, differ by ten times that.
CLOSE = {"rtol": 1e-6, "atol": 0.0}
NORM = {"rtol": 1e-5, "atol": 0.0}


def llama(*, layers: int = 2) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def config_of(mesh: dict[str, int], *, stage: int = 2, **more: Any) -> dict[str, Any]:
    replicas = math.prod(size for axis, size in mesh.items() if axis not in ("sequence", "tensor"))
    spmd = {"mesh": mesh, "min_shard_elements": 64, **more.pop("spmd", {})}
    return {
        "train_micro_batch_size_per_gpu": ROWS // replicas,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "spmd": spmd,
        **more,
    }


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def started(mesh: dict[str, int], **more: Any) -> Any:
    model = more.pop("model", None) or llama()
    engine, *_ = spmdzero.initialize(model=model, config=config_of(mesh, **more))
    return engine


def trained(engine: Any, steps: int = 4, *, calls: str = "train_batch") -> list[float]:
    """The loss of each step, and the norm of the last."""
    found = []
    for step in range(steps):
        if calls == "train_batch":
            loss = engine.train_batch(iter([batch(step)]))
        else:
            loss = engine(**batch(step)).loss
            engine.backward(loss)
            engine.step()
        found.append(loss.item())
    return [*found, float(engine.get_global_grad_norm())]


def assert_same(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(found[:-1], expected[:-1], **CLOSE)
    torch.testing.assert_close(found[-1], expected[-1], **NORM)


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    """The whole gradient of each parameter, by name."""
    named = dict(engine.module.named_parameters())
    return {name: spmdzero.utils.safe_get_full_grad(p) for name, p in named.items()}


def assert_same_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        # An element is a sum of terms that cancel: it is as exact as the largest is large.
        largest = expected.abs().max().item()
        torch.testing.assert_close(found[name], expected, rtol=0.0, atol=3e-6 * largest)


def assert_gradients_are_those_of_one_axis(mesh: dict[str, int], *, stage: int) -> None:
    found = []
    for axes in ({"fsdp": 8}, mesh):
        engine = started(axes, stage=stage)
        engine.backward(engine(**batch(0)).loss)
        found.append(gradients(engine))
    assert_same_gradients(found[1], found[0])


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """Losses and norm on one axis."""
    return trained(started({"fsdp": 8}))


@pytest.fixture(scope="module")
def shared() -> Any:
    """An engine on 4 replicas of two devices that has trained 4 steps, and what it trained."""
    engine = started({"fsdp": 4, "tensor": 2})
    return engine, trained(engine)


def test_losses_and_norm_are_those_of_one_axis(alone: list[float], shared: Any) -> None:
    assert_same(shared[1], alone)


def test_each_device_holds_its_heads_of_a_weight_and_its_part_of_the_states(shared: Any) -> None:
    engine, _ = shared
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = dict(engine.module.named_parameters())[name]
    assert set(arrays.local_shapes(weight)) == {(WIDTH // 2, WIDTH)}
    moment = engine.optimizer.state[weight]["exp_avg"]
    assert set(arrays.local_shapes(moment)) == {(WIDTH // 2, WIDTH // 4)}
    planned, held = engine.plan.memory(), spmdzero.measure(engine)
    assert held[Role.PARAMETER] == planned[Role.PARAMETER] > 0
    assert held[Role.MOMENT] == planned[Role.MOMENT] > 0
    norm = engine.module.model.norm.weight
    assert set(arrays.local_shapes(norm)) == {(WIDTH,)}
    assert weight.shape == (WIDTH, WIDTH)
    assert (
        engine.plan.at_rest(f"parameter/{name}").placement.short(weight.shape, engine.mesh.spec)
        == "R T(0)"
    )


def test_the_program_sums_what_devices_have_parts_of_and_gathers_nothing(shared: Any) -> None:
    engine, _ = shared
    with spmdzero.record_ledgers(engine) as ledgers:
        engine.train_batch(iter([batch(9)]))
    ledger = ledgers.boundary
    assert ledger.activations == ()
    within = [c for c in ledger.of_role("tensor") if not c.is_scalar]
    assert {c.kind for c in within} == {"all-reduce"}
    whole = Counter(c.shape for c in within)[ROWS // 4 * LENGTH, WIDTH]
    # Forward: two for each block. That of the embedding is in a program before this one, which ends
    # where transformers reads a value. Backward: XLA's CPU compiler sums the gradients of q, k, v,
    # gate and up one by one, and that of the head's input.
    assert whole == 2 * 2 + 2 * 5 + 1
    # What is left are the loss's vectors, one number for each token.
    assert all(math.prod(c.shape) == ROWS // 4 * LENGTH for c in within if c.shape[-1] != WIDTH)
    programs = [ProgramLedger(kind="boundary", runs=1, ledger=ledger)]
    moves = measure_moves(engine.plan, programs, stray=(), target="cpu", topology=None)
    # Of two devices each sends the other half of a tensor, and then its sum.
    assert moves.tensor_bytes == sum(c.bytes for c in ledger.of_role("tensor"))
    assert moves.sequence_bytes == 0
    gathered = {c.tensor: c for c in ledger.of_role("parameter")}
    assert gathered["model.layers.0.self_attn.q_proj.weight"].group_size == 4
    assert gathered["model.layers.0.self_attn.q_proj.weight"].shape == (WIDTH // 2, WIDTH)


@pytest.mark.filterwarnings("ignore")
def test_logits_and_what_is_generated_are_those_of_the_model_alone(shared: Any) -> None:
    engine, _ = shared
    plain, ids = llama(), batch(30)["input_ids"]
    plain.load_state_dict(engine.module.state_dict())
    engine.eval()
    with torch.no_grad():
        logits, expected = engine(input_ids=ids).logits.cpu(), plain(input_ids=ids).logits
        tokens = engine.module.generate(ids[:, :4], max_new_tokens=2, do_sample=False).cpu()
    engine.train()
    largest = expected.abs().max().item()
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=3e-6 * largest)
    assert torch.equal(tokens, plain.generate(ids[:, :4], max_new_tokens=2, do_sample=False))


def test_a_checkpoint_goes_from_mesh_to_mesh(shared: Any, tmp_path: Path) -> None:
    engine, _ = shared
    engine.save_checkpoint(tmp_path, tag="kept")
    after = [engine.train_batch(iter([batch(20 + step)])).item() for step in range(2)]
    other = started({"fsdp": 2, "tensor": 4}, stage=3)
    other.load_checkpoint(tmp_path, tag="kept")
    again = [other.train_batch(iter([batch(20 + step)])).item() for step in range(2)]
    torch.testing.assert_close(again, after, **CLOSE)


def test_deepspeeds_section_asks_for_the_axis(
    alone: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    skipped = [r".*layers\.1\.mlp\.down_proj\.weight$"]
    specs = [
        {"patterns": skipped, "partition_type": "skip", "model_types": ["llama"]},
        {"patterns": [r".*"], "partition_type": "skip", "model_types": ["gpt2"]},
        {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.[qkv]_proj\.weight$", r".*\.(up|gate)_proj\.weight$"]},
        {"patterns": [r".*\.qkv\.weight$"], "shape": [3, -1], "partition_dim": 0},
    ]
    section = {"autotp_size": 2, "partition_config": {"layer_specs": specs}}
    config = config_of({"fsdp": 4}, tensor_parallel=section)
    config["spmd"]["mesh"] = {"fsdp": -1}
    engine, *_ = spmdzero.initialize(model=llama(), config=config)
    assert dict(engine.mesh.spec.axes) == {"fsdp": 4, "tensor": 2}
    assert engine.autotp_size() == 2
    assert "partition_config: shape has no effect" in caplog.text
    # The specs name no embedding and no head, and leave one layer out.
    for name, shard in (
        ("lm_head", (WORDS, WIDTH)),
        ("model.layers.0.mlp.down_proj", (WIDTH, WIDTH)),
        ("model.layers.1.mlp.down_proj", (WIDTH, 2 * WIDTH)),
    ):
        weight = engine.module.get_parameter(f"{name}.weight")
        assert set(arrays.local_shapes(weight)) == {shard}
    assert_same(trained(engine), alone)


def test_a_model_inside_of_a_users_module_is_split_by_its_own_plan() -> None:
    inside = nn.Module()
    inside.add_module("inner", llama())
    config = load_config(config_of({"fsdp": 4, "tensor": 2}))
    mesh = MeshSpec((("fsdp", 4), ("tensor", 2)))
    dims = tensor_dims(config, inside, mesh=mesh)
    assert dims["inner.model.layers.1.mlp.down_proj.weight"] == 1
    assert {f"inner.{n}" for n in tensor_dims(config, llama(), mesh=mesh)} == dims.keys()
    with pytest.raises(SpmdZeroConfigError, match="num_key_value_heads = 4"):
        tensor_dims(config, inside, mesh=MeshSpec((("fsdp", 1), ("tensor", 8))))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapted_layer_is_split_as_the_layer_that_it_adapts() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(1)
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], lora_dropout=0.0)
        return peft.get_peft_model(llama(), adapters)

    found = []
    for mesh in ({"fsdp": 8}, {"fsdp": 4, "tensor": 2}):
        engine = started(mesh, model=adapted())
        found.append(trained(engine, 2))
    assert_same(*found)
    named = {name.rpartition("layers.1.")[2]: name for name in engine.plan.names}
    for name, shard in (
        ("self_attn.q_proj.base_layer.weight", (WIDTH // 2, WIDTH)),
        ("self_attn.o_proj.base_layer.weight", (WIDTH, WIDTH // 2)),
    ):
        weight = engine.module.get_parameter(named[name])
        assert set(arrays.local_shapes(weight)) == {shard}


def test_tp_model_init_says_the_size() -> None:
    spmdzero.set_autotp_mode(training=True)
    config = config_of({"fsdp": 4})
    config["spmd"]["mesh"] = {"fsdp": -1}
    model = spmdzero.tp_model_init(llama(), tp_size=2, dtype=torch.float32)
    engine, *_ = spmdzero.initialize(model=model, config=config)
    assert dict(engine.mesh.spec.axes) == {"fsdp": 4, "tensor": 2}
    other = spmdzero.tp_model_init(llama(), tp_size=4, dtype=torch.float32)
    with pytest.raises(SpmdZeroConfigError, match=r"tp_model_init\(tp_size=4\) says otherwise"):
        spmdzero.initialize(model=other, config=config | {"tensor_parallel": {"autotp_size": 2}})
    with pytest.raises(SpmdZeroUsageError, match="tp_group"):
        spmdzero.tp_model_init(llama(), tp_size=2, dtype=torch.float32, tp_group=object())
    with pytest.raises(SpmdZeroUsageError, match="no inference engine"):
        spmdzero.set_autotp_mode()


class Branches(nn.Module):
    """Two layers and a loss, of a kind that no plan of transformers covers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.fc2(self.fc1(x).relu()) - x).square().mean()


CPU = {"device": "cpu"}
PAIR = {"fc1.*": "column", "fc2.weight": "row"}


def refusals() -> Iterator[tuple[nn.Module, dict[str, Any], str]]:
    split = {"partition": PAIR}
    mesh = {"fsdp": 4, "tensor": 2}
    yield Branches(), config_of(mesh), "nothing says which weights of Branches"
    yield Branches(63), config_of(mesh, spmd=split), "fc1.weight .63, 32. doesn't divide by 2"
    yield llama(), config_of({"fsdp": 1, "tensor": 8}), "num_key_value_heads = 4"
    yield Branches(), config_of(mesh, spmd=split | {"forward": "global"}), "spmd.forward"
    twice = config_of(mesh, spmd=split, tensor_parallel={"autotp_size": 4})
    yield Branches(), twice, "the same axis"


@pytest.mark.parametrize("case", range(5))
def test_what_does_not_fit_is_refused_with_the_numbers(case: int) -> None:
    model, config, said = [*refusals()][case]
    with pytest.raises(SpmdZeroConfigError, match=said):
        spmdzero.initialize(model=model, config=config)


def test_biases_are_split_with_their_columns_and_small_states_stay() -> None:
    engine, *_ = spmdzero.initialize(
        model=Branches(), config=config_of({"fsdp": 4, "tensor": 2}, spmd={"partition": PAIR})
    )
    assert {t.name: t.param.tensor_dim for t in engine.plan} == {
        "fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1, "fc2.bias": None,
    }  # fmt: skip
    plain, *_ = spmdzero.initialize(model=Branches(), config=config_of({"fsdp": 8}))
    plain.module.load_state_dict(engine.module.state_dict())
    x = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for each in (engine, plain):
        losses = [each.train_batch(iter([(x,)])).item() for _ in range(3)]
        # A state that only the axis tensor splits counts once in the norm.
        found.append([*losses, float(each.get_global_grad_norm())])
    assert_same(*found)


def halves(mesh: dict[str, int], split: dict[str, Any], *, stage: int, hysteresis: int) -> Any:
    """An engine in fp16 whose loss scale is doubled after 2 steps."""
    scale = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": hysteresis}
    torch.manual_seed(0)
    config = config_of(mesh, stage=stage, spmd=split, fp16={"enabled": True} | scale)
    return spmdzero.initialize(model=Branches(), config=config)[0]


@pytest.mark.parametrize(
    ("stage", "hysteresis"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow), (3, 1)]
)
def test_an_overflow_on_one_device_of_a_replica_skips_the_step_on_all(
    stage: int, hysteresis: int
) -> None:
    engine = halves(
        {"fsdp": 4, "tensor": 2}, {"partition": PAIR}, stage=stage, hysteresis=hysteresis
    )
    rows = zip(GRADIENTS["some"], SCALES["some", hysteresis], SKIPPED["some"], strict=True)
    for gradient, scale, skipped in rows:
        engine.backward(engine(torch.ones(ROWS, 32, dtype=torch.float16)))
        for parameter in engine.module.parameters():
            # One element, which one device has.
            written = torch.full(parameter.shape, FINE)
            written[(-1,) * parameter.dim()] = gradient
            safe_set_full_grad(parameter, written)
        engine.step()
        assert (engine.optimizer.cur_scale, engine.skipped_steps) == (scale, skipped)
        for parameter in engine.module.parameters():
            parts = [part.isfinite().all() for part in arrays.local_shards(parameter)]
            assert all(parts)


def test_in_fp16_losses_scale_and_skips_are_those_of_one_axis() -> None:
    found, counted = [], []
    for mesh, split in (({"fsdp": 8}, {}), ({"fsdp": 4, "tensor": 2}, {"partition": PAIR})):
        engine = halves(mesh, split, stage=2, hysteresis=1)
        generator = torch.Generator().manual_seed(1)
        found.append([])
        for step in range(6):
            x = torch.randn(ROWS, 32, generator=generator).half()
            # The square of 1,000 is no number of fp16.
            loss = engine.train_batch(iter([(x * 1000 if step == 2 else x,)])).item()
            found[-1].append(0.0 if step == 2 else loss)
        counted.append((engine.optimizer.cur_scale, engine.skipped_steps))
    assert counted == [(256.0, 1)] * 2
    # A sum of two halves is rounded once more, by an eps of fp16 at most.
    torch.testing.assert_close(found[1], found[0], rtol=torch.finfo(torch.float16).eps, atol=0.0)


class Tied(nn.Module):
    """An embedding that is the head too, with words split over the axis."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.inner = Branches()
        self.head = nn.Linear(32, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.inner.fc2(self.inner.fc1(hidden).relu())
        wanted = ids.roll(1, 1).flatten()
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), wanted)


def test_a_tied_weight_is_split_by_either_name() -> None:
    split = {"inner.fc1.weight": "column", "inner.fc2.weight": "row", "head.weight": "column"}
    found = []
    for mesh, spmd in (({"fsdp": 8}, {}), ({"fsdp": 4, "tensor": 2}, {"partition": split})):
        torch.manual_seed(0)
        engine = started(mesh, spmd=spmd, model=Tied())
        if spmd:
            assert engine.plan["embed.weight"].param.tensor_dim == 0
            assert set(arrays.local_shapes(engine.module.head.weight)) == {(WORDS // 2, 32)}
        ids = batch(0)["input_ids"]
        losses = [engine.train_batch(iter([(ids,)])).item() for _ in range(3)]
        found.append([*losses, float(engine.get_global_grad_norm())])
    assert_same(*found)


@pytest.mark.slow
def test_a_loop_of_equal_blocks_gathers_no_heads() -> None:
    mesh = {"fsdp": 4, "tensor": 2}
    engine = started(mesh, spmd={"scan": "on"}, model=llama(layers=4))
    with spmdzero.record_ledgers(engine) as ledgers:
        engine.train_batch(iter([batch(9)]))
    sums = [c.shape for c in ledgers.boundary.of_role("tensor") if c.kind == "all-reduce"]
    # Two in the loop of the forward, five in that of the backward, and that of the head's input.
    assert Counter(sums)[ROWS // 4 * LENGTH, WIDTH] == 2 + 5 + 1
    assert ledgers.boundary.activations == ()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_offloaded_trains_bit_for_bit_as_what_is_not(stage: int) -> None:
    found = []
    for offloaded in ({}, {"offload_optimizer": CPU, "offload_param": CPU}):
        config = config_of({"fsdp": 4, "tensor": 2}, stage=stage, bf16={"enabled": True})
        config["zero_optimization"] |= offloaded
        engine, *_ = spmdzero.initialize(model=llama(), config=config)
        losses = trained(engine)
        tensors = {name: tensor.detach().cpu() for name, tensor in engine.named_tensors().items()}
        rests = zip(tensors, arrays.are_on_host([*engine.named_tensors().values()]), strict=True)
        planned = {name for name in tensors if engine.plan.at_rest(name).on_host}
        assert {name for name, there in rests if there} == planned
        found.append((losses, tensors))
    (plain, states), (losses, other) = found
    assert losses == plain
    assert [name for name in states if not torch.equal(states[name], other[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["train_batch", "three calls"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "mesh",
    [{"fsdp": 4, "tensor": 2}, {"fsdp": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}],
    ids=str,
)
def test_all_stages_and_calls(mesh: dict[str, int], stage: int, calls: str) -> None:
    plain = trained(started({"fsdp": 8}, stage=stage), 20, calls=calls)
    found = trained(started(mesh, stage=stage), 20, calls=calls)
    assert_same(found, plain)


@pytest.mark.slow
def test_losses_are_those_of_deepspeeds_autotp(shared: Any, tmp_path: Path) -> None:
    asked = ["-m", "tests.jax_backend.autotp_peer", "0", "4"]
    ranks = run_ranks(asked, ranks=2, cwd=ROOT, timeout=300)
    peer = json.loads(ranks[0].splitlines()[-1])
    # torch adds up in another order on its CPU, and Adam enlarges the difference from step to step.
    torch.testing.assert_close(shared[1][:-1], peer[:-1], rtol=2e-6, atol=0.0)
    torch.testing.assert_close(shared[1][-1], peer[-1], rtol=1e-4, atol=0.0)
