"""A loop written with Fabric: `python -m tests.integrations.fabric_loop ROLE FOLDER ACCUMULATION`.

The ROLE is ``plain``, Fabric alone on one CPU process, or ``spmdzero``. An ACCUMULATION of 0 is one
of 1 whose steps are given a closure. Prints what it saw as JSON.
"""

import json
import sys
from typing import Any

import spmdzero.integrations

spmdzero.integrations.install()

# ruff: noqa: E402
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    role, folder, gas = sys.argv[1], sys.argv[2], int(sys.argv[3])
    strategy: dict[str, Any] = {"devices": 1} if role == "plain" else {"strategy": "spmdzero"}
    fabric = Fabric(accelerator="cpu", **strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    x = torch.randn(128, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=16))

    def epoch() -> list[float]:
        losses = []
        for index, (inputs, wanted) in enumerate(loader):
            if gas == 0:

                def closure() -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(model(inputs), wanted)  # noqa: B023
                    fabric.backward(loss)
                    return loss

                losses.append(optimizer.step(closure).item())
                continue
            loss = nn.functional.mse_loss(model(inputs), wanted)
            fabric.backward(loss / gas)
            if (index + 1) % gas == 0:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses = epoch()
    state = {"model": model, "optimizer": optimizer, "batches": len(losses)}
    fabric.save(f"{folder}/{role}", state)
    losses += epoch()
    steps = model._forward_module.global_steps if role == "spmdzero" else 0
    fabric.load(f"{folder}/{role}", state)
    seen = {"losses": losses, "steps": steps, "batches": state["batches"], "resumed": epoch()}
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
