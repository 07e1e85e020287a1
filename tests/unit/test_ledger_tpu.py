"""The ledger of what libtpu compiles: combined reductions, fused reduce-scatters, async pairs.

`v5e_2x4_stage2_bf16.txt` is cut out of the program that libtpu 0.0.21 made of the contract GPT at
width 512 (tests/explain/golden.py): what the collectives read stands as inputs.
"""

from pathlib import Path

import pytest

from spmdzero.inspect import Collective, CollectiveLedger

DATA = Path(__file__).parents[1] / "data/hlo"


def ledger(name: str) -> CollectiveLedger:
    return CollectiveLedger.from_hlo((DATA / name).read_text())


@pytest.fixture(scope="module")
def v5e() -> CollectiveLedger:
    return ledger("v5e_2x4_stage2_bf16.txt")


@pytest.fixture(scope="module")
def pairs() -> dict[tuple[str, str], Collective]:
    return {(c.role, c.tensor): c for c in ledger("async_pairs.txt").collectives}


def test_one_fusion_scatters_three_named_gradients(v5e):
    scattered = {c.tensor: c for c in v5e.collectives if c.kind == "reduce-scatter"}
    assert {name: (c.role, c.shape) for name, c in scattered.items()} == {
        "h.1.mlp.c_fc.weight": ("gradient", (2048, 512)),
        "h.1.mlp.c_proj.weight": ("gradient", (512, 2048)),
        "lm_head.weight": ("gradient", (1024, 512)),
    }
    assert all(c.scattered and c.dtype == "bf16" for c in scattered.values())


def test_bytes_of_a_fused_reduce_scatter_are_those_of_its_tensors(v5e):
    scattered = [c for c in v5e.collectives if c.kind == "reduce-scatter"]
    assert sum(c.bytes for c in scattered) == 2 * (2048 * 512 + 512 * 2048 + 1024 * 512)


def test_each_tensor_of_a_combined_all_reduce_is_named(v5e):
    reduced = [c.tensor for c in v5e.collectives if c.kind == "all-reduce"]
    assert len(reduced) == len(set(reduced)) == 18
    assert {"h.0.ln_1.weight", "h.1.mlp.c_fc.bias", "ln_f.bias"} <= set(reduced)


def test_nothing_of_it_is_an_activation(v5e):
    assert v5e.activations == ()


def test_the_end_of_an_async_pair_names_what_its_start_moves(pairs):
    assert {key: (c.kind, c.bytes) for key, c in pairs.items()} == {
        ("gradient", "wte.weight"): ("reduce-scatter", 64 * 128 * 2),
        ("parameter", "wte.weight"): ("all-gather", 64 * 128 * 2),
        ("gradient", "ln.weight"): ("all-reduce", 512 * 2),
        ("gradient", "ln.bias"): ("all-reduce", 256 * 2),
    }
    assert all(c.asynchronous for c in pairs.values())


def test_a_synchronous_collective_is_not_called_async(v5e):
    assert not any(c.asynchronous for c in v5e.collectives)


def test_the_source_line_is_that_of_the_named_tensor(pairs):
    assert pairs["gradient", "wte.weight"].source == "model.py:12"
    assert pairs["gradient", "ln.bias"].source == ""
