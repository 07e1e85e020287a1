"""Losses under accelerate in bf16, and in fp8 by its argument and by its launcher's variable."""

import json
import os
from typing import Any

import torch
from torch import nn

import spmdzero.integrations


def losses(precision: str, **spmd: Any) -> list[float]:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    config = {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1,
        "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True, **({"spmd": spmd} if spmd else {}),
    }  # fmt: skip
    told = {} if precision == "launched" else {"mixed_precision": precision}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), **told)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.randn(32, 128), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for x in loader:
        loss = (model(x.bfloat16()).float() - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main() -> None:
    spmdzero.integrations.install()
    seen = {
        "bf16": losses("bf16"),
        "fp8": losses("fp8"),
        "by rows": losses("fp8", products={"dtype": "fp8", "recipe": "rowwise"}),
        "named": losses("bf16", products={"dtype": "fp8", "recipe": "rowwise"}),
    }
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
    seen["launched"] = losses("launched")
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
