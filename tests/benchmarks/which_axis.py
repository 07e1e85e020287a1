"""Stage 3 alone, and beside an axis tensor or sequence, by libtpu's estimates.

    SPMDZERO_BACKEND=jax CPU_NUM_DEVICES=64 python tests/benchmarks/which_axis.py

Programs of two and of four blocks are compiled. Their difference is a block's part, and all blocks
take what two take and such a part for each of the others. The tables are those of
docs/which_axis.md; each line takes libtpu minutes.
"""

import argparse
import dataclasses
import os
from typing import Any

import torch

import spmdzero
from spmdzero.explain import Topology

os.environ.setdefault("USE_TORCH_XLA", "false")

from transformers import LlamaConfig, LlamaForCausalLM

FEW, MORE = 2, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """One step, which meshes share in several ways.

    Attributes:
        model: of transformers' `LlamaConfig`.
        tpu: the slice.
        stage: ZeRO's.
        steps: tokens of a row, and of a chip and step, of each step.
        ways: the axis beside ``fsdp`` and its size (1 for none), and what saves memory.
    """

    model: dict[str, Any]
    tpu: str
    stage: int
    steps: tuple[tuple[int, int], ...]
    ways: tuple[tuple[str, int, dict[str, Any]], ...]


_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "tie_word_embeddings": True,
}
_AGAIN = {"recompute": "everything"}
_OFFLOADED = {"recompute": "offload", "fused_loss": True}
TABLES = {
    "70b": Table(
        model=_70B,
        tpu="v5p:4x4x4",
        stage=3,
        steps=((512, 512), (2048, 2048), (8192, 8192)),
        ways=(("tensor", 1, _AGAIN), ("tensor", 4, _AGAIN), ("sequence", 4, _AGAIN)),
    ),
    "long": Table(
        model=_1B,
        tpu="v5p:2x2x2",
        stage=2,
        steps=((32768, 8192),),
        ways=(("sequence", 1, _OFFLOADED), ("sequence", 4, _AGAIN)),
    ),
}


@dataclasses.dataclass(frozen=True)
class Found:
    """What a step takes: milliseconds, and those of waiting; bytes of chip and host, and sent."""

    time: float
    waits: float
    peak: float
    host: float
    sent: float

    def grown(self, more: "Found", layers: int) -> "Found":
        """What `layers` take, if this is what a few do, and `more` what more do."""
        times = (layers - FEW) / (MORE - FEW)
        few, many = dataclasses.astuple(self), dataclasses.astuple(more)
        return Found(*(a + times * (b - a) for a, b in zip(few, many, strict=True)))


def model(table: Table, layers: int) -> LlamaForCausalLM:
    """The table's Llama with that many layers, in bf16 and without data."""
    rest = {"vocab_size": 128256, "num_key_value_heads": 8, "use_cache": False}
    told = table.model | rest | {"num_hidden_layers": layers}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**told)).bfloat16()


def compiled(
    table: Table, layers: int, way: tuple[str, int, dict[str, Any]], length: int, tokens: int
) -> Found:
    """What a step of so many layers takes."""
    axis, size, spmd = way
    rows = Topology.parse(table.tpu).devices * tokens // length
    replicas = Topology.parse(table.tpu).devices // size
    # A row is the least that a replica takes: several chips without an axis have one each.
    rows = max(rows, replicas)
    config = {
        "train_micro_batch_size_per_gpu": rows // replicas,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": table.stage},
        "spmd": spmd | ({"mesh": {"fsdp": -1, axis: size}} if size > 1 else {}),
    }
    ids = torch.empty(rows, length, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    of = model(table, layers)
    found = spmdzero.explain(of, config, batch, tpu=[table.tpu], stages=())
    time, (fit,) = found.time_on(table.tpu), found.fit_at(table.stage).compiled
    (program,) = found.moves_on(table.tpu).programs
    sent = sum(c.wire_bytes for c in program.ledger.collectives)
    memory = fit.memory
    return Found(1e3 * time.seconds, 1e3 * time.exposed, memory.peak, memory.host_peak, sent)


def line(table: Table, way: tuple[str, int, dict[str, Any]], length: int, tokens: int) -> str:
    """One line of a table."""
    axis, size, _ = way
    few, more = (compiled(table, layers, way, length, tokens) for layers in (FEW, MORE))
    step = few.grown(more, table.model["num_hidden_layers"])
    chips = Topology.parse(table.tpu).devices
    own = max(tokens, length // size)
    cells = (
        f"{length:,}",
        f"{own * chips // length}",
        f"`{axis}` {size}" if size > 1 else "none",
        f"{step.time:,.0f}",
        f"{step.waits:,.0f}",
        f"{own / step.time:.2f}",
        f"{step.peak / 2**30:.1f}",
        f"{step.host / 2**30:.1f}",
        f"{step.sent / 1e9:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--axes", nargs="+", default=["none", "tensor", "sequence"])
    parser.add_argument("--lengths", type=int, nargs="*", help="of rows; all of a table's")
    told = parser.parse_args()
    for name in told.tables:
        table = TABLES[name]
        print(f"{name}: {table.tpu}, stage {table.stage}")
        print("| tokens of a row | rows | axis | a step, ms | of which waits ", end="")
        print("| tokens a chip and ms | GiB of a chip | of the host | sent by a chip, GB |")
        print("|---:|---:|---|---:|---:|---:|---:|---:|---:|")
        for length, tokens in table.steps:
            for way in table.ways:
                axis = "none" if way[1] == 1 else way[0]
                if axis in told.axes and length in (told.lengths or [length]):
                    print(line(table, way, length, tokens), flush=True)


if __name__ == "__main__":
    main()
