"""Trains a model of timm with its Mixup, its average of weights and one of its optimizers.

    python timm_script.py MODEL OPTIMIZER OUT [CONFIG]

With CONFIG, a DeepSpeed JSON, an engine trains; without it, plain torch in one process.
"""

import json
import sys
from pathlib import Path

import numpy as np
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn

STEPS, ROWS, CLASSES = 6, 16, 10
SETTINGS = {
    "vit_tiny_patch16_224": {
        "img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4,
    },
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (16, 32, 64, 64)},
    "resnet10t": {},
}  # fmt: skip


def main() -> None:
    name, kind, out, *config = sys.argv[1:]
    torch.manual_seed(0)
    # Mixup draws from numpy.
    np.random.seed(0)
    model = timm.create_model(name, num_classes=CLASSES, **SETTINGS[name])
    if any(isinstance(part, nn.BatchNorm2d) for part in model.modules()):
        # The statistics of all rows, as timm's --sync-bn has them.
        model = timm.layers.convert_sync_batchnorm(model) if config else model
    optimizer = create_optimizer_v2(model, opt=kind, lr=1e-3, weight_decay=0.05)
    schedule = CosineLRScheduler(
        optimizer, t_initial=STEPS, warmup_t=2, warmup_lr_init=1e-4, t_in_epochs=False
    )
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    loss_of = SoftTargetCrossEntropy()

    engine = None
    if config:
        import deepspeed

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config[0])
        model = engine.module
    average = ModelEmaV3(model, decay=0.9, use_warmup=True)

    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (STEPS, ROWS), generator=draw)
    images = torch.randn(STEPS, ROWS, 3, 32, 32, generator=draw) + labels[..., None, None, None] / 5
    losses: list[float] = []
    for step in range(STEPS):
        x, y = mixup(images[step].clone(), labels[step])
        schedule.step_update(step)
        if engine is None:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
        else:
            loss = loss_of(engine(x), y.to(engine.device))
            engine.backward(loss)
            engine.step()
        average.update(model, step=step)
        losses.append(loss.item())

    model.eval()
    with torch.no_grad():
        inputs = images[0] if engine is None else images[0].to(engine.device)
        logits, averaged = model(inputs).cpu(), average.module(inputs).cpu()
    folder = Path(out)
    folder.mkdir()
    torch.save(
        {name: value.cpu() for name, value in average.module.state_dict().items()},
        folder / "average.pth",
    )
    (folder / "result.json").write_text(
        json.dumps(
            {
                "losses": losses,
                "logits": logits.tolist(),
                "averaged": averaged.tolist(),
                "rates": [group["lr"] for group in optimizer.param_groups],
            }
        )
    )


if __name__ == "__main__":
    main()
