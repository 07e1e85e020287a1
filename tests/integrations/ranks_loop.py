"""A loop of accelerate's that knows nothing of devices, as ranks of DeepSpeed or on all devices.

`python -m tests.integrations.ranks_loop deepspeed|spmdzero SCHEDULE` prints what it saw as JSON.
SCHEDULE is torch's (``torch``), or the config's with numbers that accelerate fills in (``dummy``).
"""

import json
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.integrations.accelerate_loop import LR, data_of, model_of, prepare_process

ROWS = 4
EPOCHS = 2


def main(role: str, schedule_of: str) -> None:
    prepare_process(role)
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim, DummyScheduler

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
    }
    if schedule_of == "dummy":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0}}
        params = {"warmup_min_lr": 0, "warmup_max_lr": LR, "warmup_type": "linear"}
        config["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": params | {"warmup_num_steps": "auto", "total_num_steps": "auto"},
        }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = model_of({"frozen": False})
    order = torch.Generator().manual_seed(3)
    # Neither number of rows is a multiple of what two ranks take.
    loader = DataLoader(data_of(27, masked=False), ROWS, shuffle=True, generator=order)
    held_out = DataLoader(data_of(13, masked=False, seed=2), ROWS)
    total = len(loader) * EPOCHS
    if schedule_of == "dummy":
        optimizer: Any = DummyOptim(model.parameters(), lr=LR)
        schedule: Any = DummyScheduler(optimizer, total_num_steps=total, warmup_num_steps=4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    model, optimizer, loader, held_out, schedule = accelerator.prepare(
        model, optimizer, loader, held_out, schedule
    )
    seen: dict[str, Any] = {"batches": [len(loader), len(held_out)], "losses": [], "lr": []}
    for _ in range(EPOCHS):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen["losses"].append(accelerator.gather(loss.detach()).mean().item())
            seen["lr"].append(optimizer.param_groups[0]["lr"])
    model.eval()
    seen["first ids"] = []
    for batch in held_out:
        with torch.no_grad():
            model(**batch)
        seen["first ids"] += accelerator.gather_for_metrics(batch["input_ids"])[:, 0].tolist()
    print(json.dumps(seen), flush=True)
    if role == "deepspeed":
        import os

        torch.distributed.barrier()
        # gloo's and DeepSpeed's threads outlive the interpreter.
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
