"""Records what DeepSpeed 0.19.8's AutoEP trains: tests/data/autoep.json.

    python -m tests.oracle.autoep

Two processes on gloo, each with half of the experts.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.deepspeed import run_ranks

ROOT = Path(__file__).parents[2]
OUT = ROOT / "tests" / "data" / "autoep.json"
RANKS, ROWS, LENGTH, VOCABULARY = 2, 8, 16, 64
STEPS, MICRO_BATCHES = 4, 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 24,
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}  # fmt: skip


def model_of(preset: str) -> transformers.PreTrainedModel:
    """A mixture of DeepSpeed's preset, tiny and of random weights."""
    kind, more = MODELS[preset]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def tokens() -> torch.Tensor:
    """All rows of all ranks, of shape (step, micro-batch, row, position)."""
    generator = torch.manual_seed(1)
    shape = (STEPS, MICRO_BATCHES, ROWS, LENGTH)
    return torch.randint(0, VOCABULARY, shape, generator=generator)


def config_of(preset: str, *, stage: int, micro: int) -> dict[str, Any]:
    """The JSON, for `micro` rows of each rank."""
    return {
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0,
        "expert_parallel": {
            "enabled": True, "autoep_size": RANKS, "preset_model": preset, "use_grouped_mm": False,
        },
    }  # fmt: skip


def rank(preset: str, stage: int) -> None:
    """Trains as one rank; the first prints losses and norms."""
    import deepspeed
    import torch.distributed as dist
    from transformers.utils import output_capturing

    # DeepSpeed 0.19.8 gives it a default, which transformers 5.23 doesn't take.
    registry: Any = output_capturing._CanRecordRegistry
    found = registry.get
    registry.get = lambda self, model, default=None: found(self, model)

    deepspeed.init_distributed("gloo")
    micro = ROWS // RANKS
    config = config_of(preset, stage=stage, micro=micro)
    engine = deepspeed.initialize(model=model_of(preset), config=config)[0]
    assert any(type(each).__name__ == "AutoEPMoELayer" for each in engine.module.modules())
    losses, norms = [], []
    for step in tokens():
        mean = torch.zeros(())
        for rows in step:
            mine = rows[dist.get_rank() * micro :][:micro]
            loss = engine(input_ids=mine, labels=mine).loss
            engine.backward(loss)
            engine.step()
            mean += loss.detach() / RANKS / MICRO_BATCHES
        dist.all_reduce(mean)
        losses.append(mean.item())
        norms.append(float(engine.get_global_grad_norm() or 0))
    if dist.get_rank() == 0:
        print(json.dumps({"losses": losses, "norms": norms}))


def main() -> None:
    """Starts the ranks of each recording, and writes what the first ones print."""
    recorded = {}
    for preset, stage in [*((preset, 2) for preset in MODELS), ("mixtral", 3)]:
        asked = ["-m", "tests.oracle.autoep", preset, str(stage)]
        said = run_ranks(asked, ranks=RANKS, cwd=ROOT, timeout=600, DS_ACCELERATOR="cpu")
        recorded[f"{preset} {stage}"] = json.loads(said[0].splitlines()[-1])
    OUT.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        rank(sys.argv[1], int(sys.argv[2]))
    else:
        main()
