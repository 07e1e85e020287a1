"""Stage 3 alone, and beside an axis tensor or sequence, by libtpu's estimates.

    SPMDZERO_BACKEND=jax CPU_NUM_DEVICES=64 python tests/benchmarks/which_axis.py

Blocks in a loop are compiled once, whatever their number. Of others programs of two and of four
are compiled; their difference is a block's part, and all blocks take what two take and such a part
for each of the others. The tables are those of docs/which_axis.md; a line takes libtpu up to half
an hour.
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

FEW, MORE, SHARERS = 2, 4, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How chips share a step.

    Attributes:
        axis: the one beside ``fsdp``; None for none.
        saves: the keys of ``spmd`` that save memory.
    """

    axis: str | None
    saves: dict[str, Any]

    @property
    def size(self) -> int:
        """Chips that share a replica's rows."""
        return SHARERS if self.axis else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A step that meshes share in several ways.

    Attributes:
        model: of transformers' `LlamaConfig`.
        tpu: the slice.
        stage: ZeRO's.
        lengths: tokens of a row.
        rows: those that a replica of several chips takes; one of a single chip takes one.
        ways: of sharing.
    """

    model: dict[str, Any]
    tpu: str
    stage: int
    lengths: tuple[int, ...]
    rows: int
    ways: tuple[Way, ...]

    def rows_of(self, way: Way) -> tuple[int, int]:
        """Rows of a replica, and of all chips."""
        mine = self.rows if way.axis else 1
        return mine, mine * Topology.parse(self.tpu).devices // way.size


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
_LOOP = _AGAIN | {"scan": "on"}
_OFFLOADED = {"recompute": "offload", "fused_loss": True}
_AXES = (None, "tensor", "sequence")
_LARGE = Table(
    model=_70B,
    tpu="v5p:4x4x4",
    stage=3,
    lengths=(512, 2048, 8192),
    rows=4,
    ways=tuple(Way(axis=axis, saves=_AGAIN) for axis in _AXES),
)
_LOOPS = tuple(Way(axis=axis, saves=_LOOP) for axis in _AXES)
TABLES = {
    "70b": _LARGE,
    "70b-loop": dataclasses.replace(_LARGE, lengths=(2048,), ways=_LOOPS),
    "long": Table(
        model=_1B,
        tpu="v5p:2x2x2",
        stage=2,
        lengths=(32768,),
        rows=1,
        ways=(Way(axis=None, saves=_OFFLOADED), Way(axis="sequence", saves=_AGAIN)),
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


def compiled(table: Table, way: Way, length: int, layers: int) -> Found:
    """What a step of so many layers takes."""
    mine, rows = table.rows_of(way)
    mesh = {"fsdp": -1} | ({way.axis: way.size} if way.axis else {})
    config = {
        "train_micro_batch_size_per_gpu": mine,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "seq_parallel_communication_data_type": "bf16",
        "zero_optimization": {"stage": table.stage},
        "spmd": way.saves | {"mesh": mesh},
    }
    ids = torch.empty(rows, length, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    of = model(table, layers)
    found = spmdzero.explain(of, config, batch, tpu=[table.tpu], stages=())
    time, (fit,) = found.time_on(table.tpu), found.fit_at(table.stage).compiled
    sent, memory = found.moves_on(table.tpu).wire_bytes, fit.memory
    return Found(1e3 * time.seconds, 1e3 * time.exposed, memory.peak, memory.host_peak, sent)


def line(table: Table, way: Way, length: int) -> str:
    """One line of a table; in a loop no block is told from another."""
    layers, block = table.model["num_hidden_layers"], ("", "")
    if "scan" in way.saves:
        step = compiled(table, way, length, layers)
    else:
        few, more = (compiled(table, way, length, count) for count in (FEW, MORE))
        step = few.grown(more, layers)
        parts = (more.time - few.time, more.waits - few.waits)
        block = tuple(f"{part / (MORE - FEW):.1f}" for part in parts)
    mine, rows = table.rows_of(way)
    cells = (
        f"{length:,}",
        f"{rows}",
        f"`{way.axis}` {way.size}" if way.axis else "none",
        *block,
        f"{step.time:,.0f}",
        f"{step.waits:,.0f}",
        f"{mine * length / way.size / step.time:.2f}",
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
        print("| tokens of a row | rows | axis | a block, ms | of which waits | a step ", end="")
        print("| of which waits | tokens a chip and ms | GiB of a chip | of the host ", end="")
        print("| sent by a chip, GB |")
        print(f"|{'---|' * 11}")
        for length in told.lengths or table.lengths:
            for way in table.ways:
                if (way.axis or "none") in told.axes:
                    print(line(table, way, length), flush=True)


if __name__ == "__main__":
    main()
