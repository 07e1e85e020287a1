"""The mesh axis tensor as the TPU's compiler makes it: two all-reduces a block and pass."""

import functools
import importlib.util

import pytest

from spmdzero import Explanation
from spmdzero.explain import Topology
from tests.support.processes import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra"),
]
BLOCKS, WIDTH, LENGTH, ROWS = 2, 1024, 512, 2
SCRIPT = """
import sys
import torch
import spmdzero
from transformers import LlamaConfig, LlamaForCausalLM

tpu, devices, stage, blocks, width, length, rows = sys.argv[1:]
replicas = int(devices) // 2
config = {
    "train_micro_batch_size_per_gpu": int(rows),
    "optimizer": {"type": "AdamW"},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": int(stage)},
    "tensor_parallel": {"autotp_size": 2},
}
with torch.device("meta"):
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192, hidden_size=int(width), intermediate_size=2816,
            num_hidden_layers=int(blocks), num_attention_heads=8, num_key_value_heads=4,
            use_cache=False,
        )
    )
    ids = torch.zeros(replicas * int(rows), int(length), dtype=torch.long)
batch = {"input_ids": ids, "labels": ids}
print(spmdzero.explain(model, config, batch, tpu=[tpu], stages=()).to_json())
"""


@functools.cache
def explained(tpu: str, stage: int) -> Explanation:
    devices = Topology.parse(tpu).devices
    told = map(str, (tpu, devices, stage, BLOCKS, WIDTH, LENGTH, ROWS))
    said = run_python("-c", SCRIPT, *told, devices=devices, SPMDZERO_BACKEND="jax")
    return Explanation.from_json(said[said.index("{") :])


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("tpu", ["v5e:2x4", "v5p:2x2x2"])
def test_a_block_sends_two_sums_a_pass_over_the_axis(tpu: str, stage: int) -> None:
    found = explained(tpu, stage)
    moves = found.moves_on(tpu)
    (program,) = moves.programs
    within = [c for c in program.ledger.of_role("tensor") if not c.is_scalar]
    assert {c.kind for c in within} == {"all-reduce"}
    tokens = ROWS * LENGTH
    activations = [c for c in within if c.bytes == tokens * WIDTH * 2]
    # Two a block forward, two a block backward, one of the embedding, one of the head's input.
    assert len(activations) == 4 * BLOCKS + 2
    assert {c.dtype for c in activations} == {"bf16"}
    # No logits cross: what is left has one number a token at most.
    assert all(c.bytes <= tokens * 4 for c in within if c not in activations)
    assert moves.activations == ()
    # ZeRO's own traffic is that of each device's part.
    assert 0.9 < moves.over_floor < 1.03
    assert not found.audit.findings
    # Each device has its own heads' kernels.
    assert [use.plain_because for use in found.attention] == [None]
