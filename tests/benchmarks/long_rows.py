"""Rows of 32,768 tokens: chips that share them, or each its own, by libtpu's estimates.

    SPMDZERO_BACKEND=jax CPU_NUM_DEVICES=8 python tests/benchmarks/long_rows.py

Programs of two and of four blocks of Llama 3.2 1B are compiled. Their difference is a block's part,
and 16 blocks take what two take and 14 such parts. Compiling takes libtpu many minutes.
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

LAYERS, FEW, MORE = 16, 2, 4
WAYS: list[tuple[int, dict[str, Any]]] = [
    (1, {"recompute": "offload", "fused_loss": True}),
    (4, {"recompute": "offload"}),
    (4, {"recompute": "everything"}),
    (4, {"recompute": "nothing"}),
]


@dataclasses.dataclass(frozen=True)
class Found:
    """What a step takes: milliseconds, and those of waiting; bytes of chip and host, and sent."""

    time: float
    waits: float
    peak: float
    host: float
    sent: float

    def grown(self, more: "Found") -> "Found":
        """What all layers take, if this is what a few do, and `more` what more do."""
        times = (LAYERS - FEW) / (MORE - FEW)
        few, many = dataclasses.astuple(self), dataclasses.astuple(more)
        return Found(*(a + times * (b - a) for a, b in zip(few, many, strict=True)))


def model(layers: int) -> LlamaForCausalLM:
    """A Llama 3.2 1B of that many layers, in bf16 and without data."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def compiled(layers: int, sequence: int, spmd: dict[str, Any], told: argparse.Namespace) -> Found:
    """What a step of so many layers takes."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": told.stage},
        "sequence_parallel_size": sequence,
        "spmd": spmd,
    }
    rows = Topology.parse(told.tpu).devices // sequence
    ids = torch.empty(rows, told.tokens, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    found = spmdzero.explain(model(layers), config, batch, tpu=[told.tpu], stages=())
    time, (fit,) = found.time_on(told.tpu), found.fit_at(told.stage).compiled
    (program,) = found.moves_on(told.tpu).programs
    sent = sum(c.wire_bytes for c in program.ledger.collectives)
    memory = fit.memory
    return Found(1e3 * time.seconds, 1e3 * time.exposed, memory.peak, memory.host_peak, sent)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tpu", default="v5p:2x2x2")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32768, help="of a row")
    told = parser.parse_args()
    print(
        "| sequence | recompute | fused loss | a step, ms | of which waits | tokens a chip and ms",
        end=" ",
    )
    print("| GiB of a chip | of the host | sent, GB |")
    print("|---:|---|---|---:|---:|---:|---:|---:|---:|")
    for sequence, spmd in WAYS:
        few, more = (compiled(layers, sequence, spmd, told) for layers in (FEW, MORE))
        all_of_them = few.grown(more)
        cells = (
            sequence,
            spmd["recompute"],
            "yes" if spmd.get("fused_loss") else "no",
            f"{all_of_them.time:.0f}",
            f"{all_of_them.waits:.0f}",
            f"{told.tokens / sequence / all_of_them.time:.1f}",
            f"{all_of_them.peak / 2**30:.1f}",
            f"{all_of_them.host / 2**30:.1f}",
            f"{all_of_them.sent / 1e9:.2f}",
        )
        print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
