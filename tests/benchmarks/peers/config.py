"""The JSON that DeepSpeed and spmdzero share."""

from typing import Any

from harness.workload import CLIP, LEARNING_RATE, ROWS, WEIGHT_DECAY, Workload


def deepspeed_config(workload: Workload, *, stage: int, fused: bool = False) -> dict[str, Any]:
    """The DeepSpeed config of a workload; `fused` asks torch's AdamW for its kernel."""
    own = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "torch_adam": True}
    precision = {"bf16": {"enabled": True}} if workload.bf16 else {}
    return precision | {
        "train_micro_batch_size_per_gpu": ROWS // workload.devices,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        # torch_adam: DeepSpeed's own Adam would compile a C++ extension first.
        "optimizer": {
            "type": "AdamW",
            "params": own | ({"fused": True} if fused else {}),
        },
        "zero_optimization": {"stage": stage},
    }
