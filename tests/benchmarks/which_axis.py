"""Stage 3 alone, and beside a tensor axis: a step of Llama 70B on 64 chips, by libtpu's estimates.

    SPMDZERO_BACKEND=jax CPU_NUM_DEVICES=64 python tests/benchmarks/which_axis.py

Programs of two and of four blocks are compiled. Their difference is a block's part, and 80 blocks
take what two take and 78 such parts. A chip has as many tokens of a step with either mesh. The
table is one of docs/tensor_axis.md.
"""

import argparse
import os

import torch

import spmdzero
from spmdzero.explain import Topology

os.environ.setdefault("USE_TORCH_XLA", "false")

from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, FEW, MORE = 80, 2, 4


def model(layers: int, width: int) -> LlamaForCausalLM:
    """A Llama of 70B's form, in bf16 and without data."""
    config = LlamaConfig(
        vocab_size=128256 * width // 8192,
        hidden_size=width,
        intermediate_size=28672 * width // 8192,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def compiled(layers: int, tensor: int, tokens: int, told: argparse.Namespace) -> list[float]:
    """Milliseconds of a step, and those in which a chip waits for the wire."""
    chips = Topology.parse(told.tpu).devices
    config = {
        "train_micro_batch_size_per_gpu": tensor,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "spmd": {"recompute": "everything"},
    }
    if tensor > 1:
        config["spmd"]["mesh"] = {"fsdp": -1, "tensor": tensor}
    ids = torch.empty(chips, tokens, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    found = spmdzero.explain(model(layers, told.width), config, batch, tpu=[told.tpu], stages=())
    time = found.time_on(told.tpu)
    return [1e3 * time.seconds, 1e3 * time.exposed]


def row(tensor: int, tokens: int, told: argparse.Namespace) -> str:
    """One line of the table."""
    few = compiled(FEW, tensor, tokens, told)
    more = compiled(MORE, tensor, tokens, told)
    block = [(b - a) / (MORE - FEW) for a, b in zip(few, more, strict=True)]
    whole = few[0] + (LAYERS - FEW) * block[0]
    return f"| {tokens:,} | {tensor} | {block[0]:.1f} | {block[1]:.1f} | {whole / 1e3:.2f} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tpu", default="v5p:4x4x4")
    parser.add_argument("--tensor", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[512, 2048, 8192], help="of a chip"
    )
    parser.add_argument("--width", type=int, default=8192)
    told = parser.parse_args()
    print("| tokens a chip | tensor | a block, ms | of which waits | a step of 80 blocks, s |")
    print("|---:|---:|---:|---:|---:|")
    for tokens in told.tokens:
        for tensor in told.tensor:
            print(row(tensor, tokens, told), flush=True)


if __name__ == "__main__":
    main()
