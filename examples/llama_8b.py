"""Llama 3.1 8B, of its configuration alone: planned and explained without weights.

spmdzero explain examples.llama_8b:llama_8b examples/llama_8b.json \\
    --meta --own-stage --batch tokens={devices}x8192:int64 --tpu v6e:2x4 --tpu v5e:4x4
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Loss(nn.Module):
    """The loss of a causal language model on `[rows, length]` tokens, 0-dim."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def llama(**sizes: int) -> Loss:
    """What all sizes of Llama 3.1 have in common, with the sizes of one."""
    config = LlamaConfig(
        vocab_size=128256, num_key_value_heads=8, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=SCALING, use_cache=False, **sizes,
    )  # fmt: skip
    return Loss(LlamaForCausalLM(config))


def llama_8b(layers: int = 32) -> Loss:
    """The sizes that Meta's config.json has: 8,030,261,248 parameters."""
    return llama(
        num_hidden_layers=layers, hidden_size=4096, intermediate_size=14336, num_attention_heads=32
    )


def llama_8b_of_4_layers() -> Loss:
    """Four of its 32 layers, between its embedding and its head."""
    return llama_8b(layers=4)
