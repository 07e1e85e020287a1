"""Training with equal blocks as one loop is training without."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn

from spmdzero.engine import StepGraph
from spmdzero.hlo import read_matmuls
from spmdzero.inspect import CollectiveLedger
from tests.benchmarks.harness.workload import GPT, Size
from tests.jax_backend.for_tpus import step_for_tpus
from tests.support import engines

LAYERS, VOCABULARY, LENGTH = 4, 64, 16


def gpt() -> nn.Module:
    """With dropout, whose masks differ by block."""
    size = Size(width=32, heads=2, layers=LAYERS, vocabulary=VOCABULARY, sequence=LENGTH)
    model = GPT(size)
    for block in model.blocks:
        block.down = nn.Sequential(block.down, nn.Dropout(0.1))
    return model


class Llama(nn.Module):
    """transformers' own, of keyword inputs that all its layers share."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            num_hidden_layers=LAYERS, hidden_size=32, intermediate_size=64, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        if checkpointed:
            self.model.activation_checkpointing_enable()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=labels).loss


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (count, 2, 8, LENGTH)
    return [tuple(each) for each in torch.randint(VOCABULARY, shape, generator=generator)]


def train(
    scan: str, model: Callable[[], nn.Module], call: Callable[..., Any], micro: int, **config: Any
) -> tuple[list[float], str, Counter[tuple[str, ...]]]:
    """Losses and norms of two steps; the last one's last program, and its collectives."""
    torch.manual_seed(0)
    more = {"gradient_accumulation_steps": micro, "spmd": {"scan": scan}}
    engine = engines.start(model(), **more, **config)
    numbers, graphs = [], list[tuple[str, Counter[tuple[str, ...]]]]()

    def look(graph: StepGraph) -> None:
        text = graph.hlo()
        ledger = CollectiveLedger.from_hlo(text, outputs=graph.outputs)
        graphs.append((text, Counter((str(c.tensor), c.role, c.kind) for c in ledger.collectives)))

    data = batches(2 * micro)
    for step in range(2):
        with engine.observe(look) if step == 1 else contextlib.nullcontext():
            loss = call(engine, *data[micro * step : micro * (step + 1)])
        numbers += [float(loss.detach()), float(engine.get_global_grad_norm())]
    return numbers, *graphs[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "call", "config"),
    [
        (gpt, engines.three_calls, {"micro": 1}),
        (gpt, engines.three_calls, {}),
        (gpt, engines.one_call, {}),
        (gpt, engines.one_call, {"zero_optimization": {"stage": 1}}),
        (gpt, engines.one_call, {"bf16": {"enabled": True}}),
        (gpt, engines.one_call, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        (Llama, engines.three_calls, {}),
        (Llama, engines.one_call, {}),
        (lambda: Llama(checkpointed=True), engines.three_calls, {}),
    ],
    ids=[
        *("one micro-batch", "three calls", "train_batch", "stage 1", "bf16", "autocast"),
        *("llama", "llama, train_batch", "llama, checkpointed"),
    ],
)
def test_losses_norms_and_collectives_are_those_of_the_blocks(
    request: pytest.FixtureRequest,
    model: Callable[[], nn.Module],
    call: Callable[..., Any],
    config: dict[str, Any],
) -> None:
    micro = config.get("micro", 2)
    config = {key: value for key, value in config.items() if key != "micro"}
    expected, unrolled, theirs = train("off", model, call, micro, **config)
    found, looped, crossed = train("on", model, call, micro, **config)
    # fp32's 7 digits, of sums that fusions order otherwise; bf16 has 8 bits, and a norm sums many.
    half = "bf16" in config or "torch_autocast" in config
    assert found == pytest.approx(expected, rel=4e-3 if half else 1e-5)
    assert crossed == theirs
    assert f'"known_trip_count":{{"n":"{LAYERS}"}}' in looped
    # The head and the embedding's side aside, there are the products of one block. A loop that is
    # checkpointed runs the forward's third of them again; unrolled, XLA merges the two runs.
    mine, its = (len(read_matmuls(text)) for text in (looped, unrolled))
    again = its / LAYERS / 3 if "checkpointed" in request.node.callspec.id else 0
    assert mine <= its / LAYERS + again + 6


@pytest.mark.skipif(not hasattr(jax.lax, "empty"), reason="an older JAX has no unwritten arrays")
def test_no_stack_is_filled_before_the_loops_write_it() -> None:
    engine = engines.start(gpt(), bf16={"enabled": True}, spmd={"scan": "on"})
    text = step_for_tpus(engine, batches(1)[0])
    # Of 4 blocks, by a device with one row.
    stack = rf"tensor<{LAYERS}x\S*>"
    assert len(re.findall(rf"@AllocateBuffer\(\).* -> {stack}", text)) > 2 * LAYERS
    assert not re.search(rf"broadcast_in_dim .*: \(tensor<\w+>\) -> {stack}", text)
