"""The mesh axis tensor as the TPU's compiler makes it: two all-reduces a block and pass."""

import functools
import importlib.util
import json

import pytest

from spmdzero import Explanation
from spmdzero.explain import Topology
from tests.support.processes import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra"),
]
BLOCKS, WIDTH, LENGTH, ROWS, DEVICES = 2, 1024, 512, 2, 8
SCRIPT = """
import json
import sys
import torch
import spmdzero
from transformers import LlamaConfig, LlamaForCausalLM

tpu, devices, stage, offloads, flags, blocks, width, length, rows = sys.argv[1:]
replicas = int(devices) // 2
config = {
    "train_micro_batch_size_per_gpu": int(rows),
    "optimizer": {"type": "AdamW"},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": int(stage), **json.loads(offloads)},
    "tensor_parallel": {"autotp_size": 2},
    "spmd": {"xla_flags": flags},
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
def explained(tpu: str, stage: int, offloads: str = "{}", flags: str = "none") -> Explanation:
    devices = Topology.parse(tpu).devices
    told = (tpu, devices, stage, offloads, flags, BLOCKS, WIDTH, LENGTH, ROWS)
    said = run_python("-c", SCRIPT, *map(str, told), devices=devices, SPMDZERO_BACKEND="jax")
    return Explanation.from_json(said[said.index("{") :])


@pytest.mark.parametrize("stage", [2, 3])
# Without flags libtpu combines gradients of this size into one sum on v5p:2x2x4, as `explain` says.
@pytest.mark.parametrize(("tpu", "flags"), [("v5e:2x4", "none"), ("v5p:2x2x4", "auto")])
def test_a_block_sends_two_sums_a_pass_over_the_axis(tpu: str, flags: str, stage: int) -> None:
    found = explained(tpu, stage, flags=flags)
    moves = found.moves_on(tpu)
    (program,) = moves.programs
    within = [c for c in program.ledger.of_role("tensor") if not c.is_scalar]
    assert {c.kind for c in within} == {"all-reduce"}
    tokens = ROWS * LENGTH
    activations = [c for c in within if c.bytes == tokens * WIDTH * 2]
    # Two a block forward, two a block backward, one of the embedding, one of the head's input.
    assert len(activations) == 4 * BLOCKS + 2
    assert {c.dtype for c in activations} == {"bf16"}
    assert moves.tensor_bytes == sum(c.wire_bytes for c in program.ledger.of_role("tensor"))
    assert f"{moves.tensor_bytes:,} of these bytes go to devices that share" in str(found)
    # No logits cross: what is left has one number a token at most.
    assert all(c.bytes <= tokens * 4 for c in within if c not in activations)
    assert moves.activations == ()
    # ZeRO's own traffic is that of each device's part.
    assert 0.9 < moves.over_floor < 1.03
    assert not found.audit.findings
    # Each device has its own heads' kernels.
    assert [use.plain_because for use in found.attention] == [None]


@pytest.mark.parametrize("stage", [2, 3])
def test_each_device_has_its_part_of_what_is_offloaded_in_the_hosts_memory(stage: int) -> None:
    tpu, cpu = "v5e:2x4", {"device": "cpu"}
    plain = explained(tpu, stage)
    found = explained(tpu, stage, json.dumps({"offload_optimizer": cpu, "offload_param": cpu}))
    (before,), (after,) = (e.fit_at(stage).compiled for e in (plain, found))
    moved = found.fit_at(stage).plan.host_total
    # A master and two moments of fp32, at stage 3 a parameter of bf16: of a matrix an eighth.
    least = (12 if stage == 2 else 14) * BLOCKS * (3 * 2816 + 3 * WIDTH) * WIDTH // DEVICES
    assert moved > least
    assert after.memory.host_arguments == after.memory.host_peak == moved
    assert before.memory.arguments is not None
    assert after.memory.arguments is not None
    assert before.memory.arguments - after.memory.arguments == moved
    ledgers = [e.moves_on(tpu).programs[0].ledger for e in (plain, found)]
    sent = [sum(c.bytes for c in ledger.of_role("tensor")) for ledger in ledgers]
    assert sent[0] == sent[1]
