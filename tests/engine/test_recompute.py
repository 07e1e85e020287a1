"""`"spmd": {"recompute": ...}`: the same numbers with less memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from spmdzero.engine import StepGraph
from spmdzero.errors import ReplicaRegionError, SpmdZeroConfigError
from spmdzero.inspect import peak_temporary_bytes
from tests.support.bounds import assert_summed
from tests.support.engines import start

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

POLICIES = ("nothing", "dots", "everything")
WIDTH, ROWS, BLOCKS = 16, 1024, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        y = F.dropout(torch.tanh(self.up(self.norm(x))), 0.25, self.training)
        return x + torch.sin(torch.exp(torch.tanh(self.down(y) * scale)))


class Stack(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().mean()


def train(
    recompute: Any, *, cpu_checkpointing: bool = False, blocks: int = BLOCKS, **more: Any
) -> tuple[list[float], torch.Tensor, int]:
    """Three losses, the trained weights, and the bytes that the program of a step needs."""
    torch.manual_seed(0)
    engine = start(
        Stack(blocks),
        train_micro_batch_size_per_gpu=ROWS,
        spmd={"recompute": recompute, **more},
        activation_checkpointing={"cpu_checkpointing": cpu_checkpointing},
    )
    batch = torch.randn(8 * ROWS, WIDTH)
    torch.manual_seed(5)
    texts: list[str] = []
    with engine.observe(lambda graph: texts.append(graph.hlo())):
        losses = [engine.train_batch(batch).item()]
    losses += [engine.train_batch(batch).item() for _ in range(2)]
    weights = torch.cat([p.detach().cpu().flatten() for p in engine.module.parameters()])
    return losses, weights, peak_temporary_bytes(texts[0])


@pytest.fixture(scope="module")
def trained() -> dict[str, tuple[list[float], torch.Tensor, int]]:
    return {policy: train(policy) for policy in POLICIES}


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_losses_and_weights_are_those_without_dropout_included(trained: Any, policy: str) -> None:
    losses, weights, _ = trained[policy]
    expected, others, _ = trained["nothing"]
    # fp32: what is fused with what, and so rounded, differs. AdamW's first steps of lr = 1e-3 take
    # gradients' signs, which can differ where one is as small as its rounding.
    assert losses == pytest.approx(expected, rel=1e-5)
    assert ((weights - others).abs() > 1e-5).float().mean() < 1e-3


def test_memory_falls_with_what_is_recomputed(trained: Any) -> None:
    nothing, dots, everything = (trained[policy][2] for policy in POLICIES)
    # Of a block "everything" keeps the input, "dots" two products more, "nothing" also the
    # normalisation, two tanh, a dropout and an exp, of which XLA computes some again by itself. The
    # last block's are all there at the peak.
    one = (BLOCKS - 1) * ROWS * WIDTH * 4
    assert nothing > dots + 3 * one
    assert dots > everything + one


def test_what_is_kept_by_name_is_kept_as_products_are(trained: Any) -> None:
    losses, weights, peak = train({"keep": ["up", "down"]})
    expected, others, dots = trained["dots"]
    # The same values are kept, and the same operations run again.
    assert losses == expected
    assert torch.equal(weights, others)
    assert peak == dots


class WritesBlock(nn.Module):
    """A block that writes in place into what a layer has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y.mul_(3.0).add_(0.5)
        return x + self.down(torch.tanh(y) * torch.sin(y))


def after_writes(recompute: Any, **more: Any) -> list[float]:
    """The losses of four steps of such blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(WritesBlock() for _ in range(4)), Squared())
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    engine = start(
        model,
        optimizer=sgd,
        zero_allow_untested_optimizer=True,
        spmd={"recompute": recompute, **more},
    )
    batch = torch.randn(8, WIDTH)
    return [engine.train_batch(batch).item() for _ in range(4)]


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_what_is_kept_is_kept_as_it_was_before_it_is_written() -> None:
    expected = after_writes("nothing")
    for policy in ("dots", {"keep": ["up"]}):
        # fp32: what is fused with what, and so rounded, differs.
        assert after_writes(policy) == pytest.approx(expected, rel=1e-5)


STAYS = "what checkpointed blocks keep stays where it is, not in host memory"


@pytest.mark.backends("torch_xla")
def test_to_offload_by_its_own_key_is_refused_where_a_backend_cant() -> None:
    with pytest.raises(SpmdZeroConfigError, match=r'torch_xla backend.*Write "everything"'):
        start(Stack(), spmd={"recompute": "offload"})


@pytest.mark.backends("torch_xla")
@pytest.mark.parametrize("scan", ["on", "auto"])
def test_a_loop_over_blocks_is_refused_where_a_backend_has_none(scan: str) -> None:
    with pytest.raises(SpmdZeroConfigError, match=r'torch_xla have no loops.*"backend": "jax"'):
        start(Stack(), spmd={"scan": scan})


@pytest.mark.backends("torch_xla")
def test_attention_by_kernels_is_refused_where_a_backend_has_none() -> None:
    with pytest.raises(SpmdZeroConfigError, match=r'torch_xla computes att.*"backend": "jax"'):
        start(Stack(), spmd={"attention": "kernel"})


@pytest.mark.backends("torch_xla")
def test_to_fit_a_budget_is_refused_where_a_backend_cant() -> None:
    with pytest.raises(SpmdZeroConfigError, match=r'torch_xla doesn.t say.*"backend": "jax"'):
        start(Stack(), spmd={"recompute": {"fit": "1GB"}})


def test_cpu_checkpointing_offloads_what_everything_keeps(
    trained: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="spmdzero"):
        losses, weights, _ = train("everything", cpu_checkpointing=True)
    assert losses == trained["everything"][0]
    assert torch.equal(weights, trained["everything"][1])
    assert caplog.text.count(STAYS) == 1


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_a_loop_over_blocks_recomputes_too() -> None:
    # Fewer than four blocks are no loop.
    blocks = 5
    expected, *_ = train("nothing", blocks=blocks)
    dots, everything = (train(policy, scan="on", blocks=blocks) for policy in POLICIES[1:])
    for losses, *_ in (dots, everything):
        assert losses == pytest.approx(expected, rel=1e-5)
    # Of each block two products.
    assert dots[2] > everything[2] + 2 * blocks * ROWS * WIDTH * 4 * 0.9


@pytest.mark.slow
def test_policies_by_name(trained: Any) -> None:
    losses, _, memory = train({"blocks.0": "nothing", "blocks.*": "everything"})
    assert losses == pytest.approx(trained["nothing"][0], rel=1e-5)
    assert trained["everything"][2] < memory < trained["nothing"][2]


@pytest.mark.parametrize(
    ("recompute", "words"),
    [
        ({"block.*": "dots"}, r"no module's name is 'block.\*'.*blocks"),
        ({"blocks.0": "dots", "blocks.0.up": "dots"}, "'blocks.0.up' is in 'blocks.0'"),
        ({"blocks.*": "some"}, "one of nothing, dots, everything, offload"),
        ("all", "one of nothing, dots, everything, offload"),
    ],
)
def test_refused_values(recompute: Any, words: str) -> None:
    with pytest.raises(SpmdZeroConfigError, match=words):
        start(Stack(), spmd={"recompute": recompute})


def test_refused_models() -> None:
    with pytest.raises(SpmdZeroConfigError, match="no two equal blocks"):
        start(Stack(1), spmd={"recompute": "dots"})
    with pytest.raises(SpmdZeroConfigError, match="global forward"):
        start(Stack(), spmd={"recompute": "dots", "forward": "global"})


def gpt2(**more: Any) -> transformers.PreTrainedModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16,
            bos_token_id=0, eos_token_id=0, **more,
        )
    )  # fmt: skip


def loss_of(model: nn.Module, **more: Any) -> float:
    engine = start(model, **more)
    ids = torch.arange(8 * 16).view(8, 16) % 64
    torch.manual_seed(3)
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    return loss.item()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (1, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


class Attentions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Attention() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


@pytest.mark.slow
@pytest.mark.backends("jax")
@pytest.mark.parametrize("scan", ["off", "on"])
def test_attention_kernels_and_what_is_kept_of_them(scan: str) -> None:
    losses: list[list[float]] = []
    products: list[int] = []

    def count(graph: StepGraph) -> None:
        products.append(graph.hlo().count(" dot("))

    for recompute in POLICIES:
        torch.manual_seed(0)
        engine = start(
            Attentions(), spmd={"recompute": recompute, "attention": "kernel", "scan": scan}
        )
        batch = torch.randn(8, 128, 64)
        with engine.observe(count):
            losses.append([engine.train_batch(batch).item()])
        losses[-1] += [engine.train_batch(batch).item() for _ in range(2)]
    nothing, dots, everything = products
    # The kernels' products are some of them; a loop keeps what "dots" keeps.
    assert nothing == dots < everything
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_transformers_blocks_with_dropout_and_the_three_calls() -> None:
    losses = []
    for recompute in POLICIES:
        torch.manual_seed(0)
        losses.append(loss_of(gpt2(use_cache=False), spmd={"recompute": recompute}))
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)


def test_blocks_that_run_once_are_refused() -> None:
    with pytest.raises(ReplicaRegionError, match=r"DynamicCache.*use_cache = False"):
        loss_of(gpt2(), spmd={"recompute": "dots"})
    model = gpt2(use_cache=False)
    model.activation_checkpointing_enable()
    with pytest.raises(ReplicaRegionError, match="checkpoints activations itself"):
        loss_of(model, spmd={"recompute": "dots"})


class Two(nn.Module):
    """The least that has equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_a_graph_that_is_kept_runs_again_for_each_backward(policy: str) -> None:
    engine = start(Two(), spmd={"recompute": policy})
    x = torch.randn(8, 4)
    loss = engine(x)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    twice = engine.module.blocks[0].weight.grad.cpu()
    plain = Two()
    plain(x).backward()
    assert_summed(twice, 2 * plain.blocks[0].weight.grad)
