"""Llama 3.1 70B, of its configuration alone: planned and explained without weights.

spmdzero explain examples.llama_70b:llama_70b examples/llama_8b.json \\
    --meta --own-stage --batch tokens={devices}x8192:int64 --tpu v5p:4x4x4
"""

from examples.llama_8b import Loss, llama


def llama_70b(layers: int = 80) -> Loss:
    """The sizes that Meta's config.json has: 70,553,706,496 parameters."""
    return llama(
        num_hidden_layers=layers, hidden_size=8192, intermediate_size=28672, num_attention_heads=64
    )
