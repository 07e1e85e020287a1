"""`"recompute": {"keep": [...], "offload": [...]}`: what of a block stays for backward, by name."""

import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from spmdzero.compat.tensor_fragment import safe_get_full_grad
from spmdzero.errors import ReplicaRegionError, SpmdZeroConfigError
from spmdzero.inspect import peak_temporary_bytes
from tests.engine.test_recompute import ROWS, WIDTH, Stack, after_writes
from tests.jax_backend.for_tpus import step_for_tpus
from tests.support.engines import start

slow = pytest.mark.slow
QKV = ["q_proj", "k_proj", "v_proj"]
HOST = '_xla_buffer_placement = "pinned_host"'


def llama(*, layers: int = 4, width: int = 32, vocabulary: int = 64) -> nn.Module:
    """A Llama with attention by torch's `scaled_dot_product_attention`."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, use_cache=False,
            num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        )
    )  # fmt: skip


def trained(
    recompute: Any, *, scan: str, stage: int, steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of some steps, and the gradients of the first by name."""
    engine = start(
        llama(),
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        spmd={"recompute": recompute, "scan": scan, "min_shard_elements": 0},
    )
    rows = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(1))
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(steps):
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        if not losses:
            for name, parameter in engine.module.named_parameters():
                found = safe_get_full_grad(parameter)
                assert found is not None
                gradients[name] = found.detach().cpu()
        engine.step()
        losses.append(loss.item())
    return losses, gradients


@functools.cache
def with_all_kept(stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """`trained` with nothing computed again."""
    return trained("nothing", scan="off", stage=stage, steps=20)


POLICIES = [
    {"keep": [*QKV, "context"], "offload": ["input"]},
    pytest.param({"keep": ["self_attn"], "offload": ["mlp.*_proj"]}, marks=slow),
    pytest.param({"keep": []}, marks=slow),
    pytest.param({"model.layers.*": {"offload": ["context", "down_proj"]}}, marks=slow),
]


@pytest.mark.parametrize("stage", [pytest.param(2, marks=slow), 3])
@pytest.mark.parametrize("scan", [pytest.param("off", marks=slow), "on"])
@pytest.mark.parametrize("policy", POLICIES)
def test_losses_and_gradients_are_those_of_keeping_all(policy: Any, scan: str, stage: int) -> None:
    losses, gradients = trained(policy, scan=scan, stage=stage, steps=20)
    expected, others = with_all_kept(stage)
    # fp32: what is fused with what differs, and so what is rounded.
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[-1] < losses[0] - 0.1
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize("scan", ["off", "on"])
def test_what_is_kept_is_kept_as_it_was_before_it_is_written(scan: str) -> None:
    expected = after_writes("nothing")
    for policy in ("dots", {"keep": ["up"]}, {"offload": ["up"]}):
        # fp32: what is fused with what, and so rounded, differs.
        assert after_writes(policy, scan=scan) == pytest.approx(expected, rel=1e-5)


def peak(recompute: Any, *, blocks: int, scan: str) -> int:
    """Bytes that the program of a step of `Stack` needs beside its inputs."""
    engine = start(
        Stack(blocks),
        train_micro_batch_size_per_gpu=ROWS,
        spmd={"recompute": recompute, "scan": scan},
    )
    texts: list[str] = []
    with engine.observe(lambda graph: texts.append(graph.hlo())):
        engine.train_batch(torch.ones(8 * ROWS, WIDTH))
    return peak_temporary_bytes(texts[0])


@pytest.mark.parametrize("scan", [pytest.param("off", marks=slow), "on"])
def test_the_peak_grows_with_each_block_by_what_is_named(scan: str) -> None:
    # Outputs of `up` and of `down` are as large as a block's input, which is kept in any case.
    one = ROWS * WIDTH * 4
    kept = [{"keep": []}, {"keep": ["up", "down"]}]
    little, much = (
        peak(policy, blocks=8, scan=scan) - peak(policy, blocks=4, scan=scan) for policy in kept
    )
    # Of four more blocks: their inputs, and two outputs more; parameters and padding are small.
    assert little == pytest.approx(4 * one, rel=0.25)
    assert much == pytest.approx(12 * one, rel=0.1)


def for_tpus(recompute: Any, *, scan: str, **more: Any) -> str:
    """The program of a step of a Llama whose attention is a kernel, as text."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama(width=256)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=rows, labels=rows).loss

    told = {"bf16": {"enabled": True}, "spmd": {"recompute": recompute, "scan": scan}}
    engine = start(WithLoss(), **told, **more)
    return step_for_tpus(engine, torch.zeros(8, 256, dtype=torch.long))


def kernels(text: str) -> int:
    """The kernels that are called in the program."""
    return text.count("@tpu_custom_call")


def test_a_kept_context_spares_the_kernel_that_made_it() -> None:
    # In a loop's body a kernel is written once: forward, again in backward, and those of backward.
    again, kept, others = (
        kernels(for_tpus(policy, scan="on"))
        for policy in ("everything", {"keep": ["context"]}, {"keep": QKV})
    )
    assert (again - kept, others) == (1, again)


def test_a_loop_stacks_on_the_host_what_is_to_rest_there() -> None:
    assert HOST not in for_tpus({"keep": QKV}, scan="on")
    for policy, told, moved in (
        ({"offload": QKV}, {}, 3),
        ("offload", {}, 1),
        ("everything", {"activation_checkpointing": {"cpu_checkpointing": True}}, 1),
    ):
        text = for_tpus(policy, scan="on", **told)
        assert "stablehlo.while" in text
        # One move of each in the body of the forward's loop; its stack is of all blocks.
        assert sum(HOST in line for line in text.splitlines()) == moved


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        (
            {"keep": ["q_prj"]},
            r"no module in 'model\.layers\.0'.*'q_prj'.*mean 'q_proj'",
        ),
        ({"keep": ["lm_head"]}, r"no module in .*There are .*'mlp\.act_fn', .*'input', 'context'"),
        ({"keep": ["input"], "offload": ["input"]}, "'input' is named twice"),
        ({"keep": ["*.q_proj"], "offload": QKV}, r"'self_attn\.q_proj' in .*kept and offloaded"),
        ({"keep": "q_proj"}, r'an object names under "keep".*Write "dots"'),
        ({"keep": [1]}, "a list of names of its modules"),
        ({"kept": ["q_proj"]}, r'an object names under "keep".*Write "dots"'),
        ({"model.layers.*": {"keep": ["mlp"]}, "model.layers.0.mlp": "dots"}, "run three times"),
    ],
)
def test_names_that_nothing_has_are_refused_with_those_that_there_are(
    recompute: Any, message: str
) -> None:
    with pytest.raises(SpmdZeroConfigError, match=rf"^spmd\.recompute = .*{message}"):
        start(llama(), spmd={"recompute": recompute})


@pytest.mark.parametrize("scan", ["off", "on"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("context", "doesn't call. Name the module that attends"),
        ("unused", "'unused' in a Idle is not called, or returns no floating-point tensor"),
    ],
)
def test_what_a_block_doesnt_compute_cant_be_kept(name: str, message: str, scan: str) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.used(x))

    model = nn.Sequential(*(Idle() for _ in range(4)))
    engine = start(model, spmd={"recompute": {"keep": [name]}, "scan": scan})
    with pytest.raises(ReplicaRegionError, match=re.escape(message)):
        engine(torch.ones(8, 4)).mean()


def test_what_has_no_region_has_no_blocks_that_run_again() -> None:
    with pytest.raises(SpmdZeroConfigError, match=r'spmd\.recompute.*"forward": "region"'):
        start(llama(), spmd={"recompute": {"keep": ["q_proj"]}, "forward": "global"})
