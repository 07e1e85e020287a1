"""The mesh axis sequence as the TPU's compiler makes it: all-to-alls around attention's kernels."""

import functools
import importlib.util
import json
import math
from collections import Counter

import pytest
import torch

import spmdzero
from spmdzero import Explanation
from spmdzero.explain import Topology
from tests.support.processes import run_python

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra"
)
TPU = "v5e:2x4"
BLOCKS, WIDTH, LENGTH, ROWS, HEADS, KV_HEADS = 2, 1024, 512, 2, 8, 4
SCRIPT = """
import json
import sys
import torch
import spmdzero
import transformers

tpu, devices, sequence, family, inputs, more, blocks, width, length, rows = sys.argv[1:]
rows, length = int(rows) * int(devices) // int(sequence), int(length)
config = {
    "train_micro_batch_size_per_gpu": int(sys.argv[-1]),
    "optimizer": {"type": "AdamW"},
    "bf16": {"enabled": True},
    "sequence_parallel_size": int(sequence),
    **json.loads(more),
}
with torch.device("meta"):
    if family == "llama":
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=8192, hidden_size=int(width), intermediate_size=2816,
                num_hidden_layers=int(blocks), num_attention_heads=8, num_key_value_heads=4,
                use_cache=False,
            )
        )
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=8192, n_positions=length, n_embd=int(width), n_layer=int(blocks),
                n_head=8, attn_pdrop=0.0, use_cache=False,
            )
        )
    batch = {name: torch.zeros(rows, length, dtype=torch.long) for name in inputs.split()}
print(spmdzero.explain(model, config, batch, tpu=[tpu], stages=()).to_json())
"""
PLAIN = "input_ids labels"
SUMS = "reduce-scatter", "all-reduce"


@functools.cache
def explained(
    sequence: int,
    more: str,
    tpu: str = TPU,
    family: str = "llama",
    inputs: str = PLAIN,
    blocks: int = BLOCKS,
) -> Explanation:
    devices = Topology.parse(tpu).devices
    told = (tpu, devices, sequence, family, inputs, more, blocks, WIDTH, LENGTH, ROWS)
    said = run_python("-c", SCRIPT, *map(str, told), devices=devices, SPMDZERO_BACKEND="jax")
    return Explanation.from_json(said[said.index("{") :])


def stage(number: int, **spmd: object) -> str:
    return json.dumps({"zero_optimization": {"stage": number}, "spmd": spmd})


def assert_rows_stay_divided(found: Explanation, tpu: str = TPU) -> None:
    """Nothing but attention's all-to-alls and sums of gradients crosses the axis."""
    moves = found.moves_on(tpu)
    (program,) = moves.programs
    within = [c for c in program.ledger.of_role("sequence") if not c.is_scalar and not c.tensor]
    assert {"all-to-all"} < {c.kind for c in within} <= {"all-to-all", *SUMS}
    assert moves.activations == ()
    # Each chip has its own heads' kernels.
    assert [use.plain_because for use in found.attention] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize(("tpu", "sequence"), [(TPU, 2), (TPU, 4), ("v5p:2x2x2", 2)])
def test_a_block_sends_all_to_alls_around_kernels(tpu: str, sequence: int, number: int) -> None:
    found = explained(sequence, stage(number), tpu)
    assert_rows_stay_divided(found, tpu)
    (program,) = found.moves_on(tpu).programs
    within = [c for c in program.ledger.of_role("sequence") if not c.is_scalar]
    moved = Counter(c.bytes for c in within if c.kind == "all-to-all" and not c.tensor)
    head = ROWS * (LENGTH // sequence) * (WIDTH // HEADS) * 2
    # Query, key and value together, and the result; forward and backward.
    assert moved == {head * (HEADS + 2 * KV_HEADS): 2 * BLOCKS, head * HEADS: 2 * BLOCKS}
    sums = {kind: sum(math.prod(c.shape) for c in within if c.kind == kind) for kind in SUMS}
    trained = BLOCKS * (3 * WIDTH * 2816 + 3 * WIDTH * WIDTH) + 2 * 8192 * WIDTH
    # Vectors come along.
    assert trained <= sum(sums.values()) <= trained * 1.01
    # The compiler keeps one product a block whole.
    assert sums["all-reduce"] < trained * 0.16
    # Each device has a part of its own of the states, as if all were replicas. That product, and
    # the parts that an all-to-all brings to where the states are, come on top.
    assert 0.9 < found.moves_on(tpu).over_floor < 1.12


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "wire"), [(None, "f32"), ("bf16", "bf16")])
def test_gradients_are_summed_in_fp32_unless_bf16_is_asked_for(
    asked: str | None, wire: str
) -> None:
    more = {"zero_optimization": {"stage": 2}}
    if asked is not None:
        more["seq_parallel_communication_data_type"] = asked
    found = explained(4, json.dumps(more))
    assert_rows_stay_divided(found)
    (program,) = found.moves_on(TPU).programs
    within, among = (
        Counter(c.dtype for c in program.ledger.of_role(role) if c.kind == "reduce-scatter")
        for role in ("sequence", "gradient")
    )
    # An embedding's is summed in fp32 on its way to its dtype.
    assert within[wire] >= 7 * BLOCKS
    assert {wire} == set(among)
    fixes = [f.fix for f in found.audit.findings if f.name == "wide-dtype"]
    assert fixes == ([] if asked else ['write "seq_parallel_communication_data_type": "bf16"'])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "inputs", "sequence", "more"),
    [
        ("llama", f"{PLAIN} position_ids", 2, stage(2)),
        ("llama", f"{PLAIN} attention_mask position_ids", 4, stage(3)),
        ("gpt2", f"{PLAIN} attention_mask position_ids", 4, stage(3)),
        ("gpt2", PLAIN, 2, stage(2)),
        ("llama", PLAIN, 2, stage(3, recompute="everything")),
        ("llama", PLAIN, 4, stage(2, recompute="offload")),
        ("llama", PLAIN, 4, stage(2, fused_loss=True)),
        ("llama", PLAIN, 2, stage(2, scan="on")),
        ("llama", PLAIN, 4, stage(3, scan="on", fused_loss=True, recompute="everything")),
    ],
)
def test_masks_positions_and_what_saves_memory(
    family: str, inputs: str, sequence: int, more: str
) -> None:
    blocks = 4 if "scan" in more else BLOCKS
    assert_rows_stay_divided(explained(sequence, more, TPU, family, inputs, blocks))


@pytest.mark.parametrize(
    "inputs", [pytest.param(PLAIN, marks=pytest.mark.slow), f"{PLAIN} position_ids"]
)
def test_integers_are_not_cut_on_their_way_to_floats(inputs: str) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=1,
                num_attention_heads=4, num_key_value_heads=4, use_cache=False,
            )
        )  # fmt: skip
        batch = {name: torch.zeros(4, 1024, dtype=torch.long) for name in inputs.split()}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "sequence_parallel_size": 2,
    }
    assert_rows_stay_divided(spmdzero.explain(model, config, batch, tpu=[TPU], stages=()))
