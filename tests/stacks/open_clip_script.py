"""Trains a CLIP of open_clip, with its data, tokenizer and losses, in a loop with an engine.

    python open_clip_script.py LOSS DATA OUT [CONFIG]

DATA has `train.csv` with `filepath` and `title`, as open_clip's own training takes it. With CONFIG,
a DeepSpeed JSON, an engine trains; without it, plain torch in one process. LOSS is ``clip``,
``siglip``, or ``gathered``, which computes open_clip's loss over all ranks in the forward.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import open_clip
import torch
import torch.distributed as dist
from open_clip.loss import SigLipLoss
from open_clip_train.data import get_csv_dataset
from torch import nn

ROWS, EPOCHS = 8, 2
SHAPE = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 2},
}


class Gathered(nn.Module):
    """A model with open_clip's loss over all ranks, as each of its ranks computes it."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        several = dist.is_initialized()
        loss = open_clip.ClipLoss(
            local_loss=True,
            gather_with_grad=True,
            rank=dist.get_rank() if several else 0,
            world_size=dist.get_world_size() if several else 1,
        )
        return loss(**self.clip(images, texts))


def main() -> None:
    kind, data, out, *config = sys.argv[1:]
    folder = Path(out)
    folder.mkdir()
    (folder / "tiny.json").write_text(json.dumps(SHAPE))
    open_clip.add_model_config(folder / "tiny.json")
    torch.manual_seed(0)
    # The scale begins at its bound, where training clamps it.
    start = {"init_logit_scale": math.log(10), "init_logit_bias": -10} if kind == "siglip" else {}
    clip, _, transform = open_clip.create_model_and_transforms("tiny", output_dict=True, **start)
    if not start:
        nn.init.constant_(clip.logit_scale, math.log(100))
    told = argparse.Namespace(
        train_data=f"{data}/train.csv", csv_img_key="filepath", csv_caption_key="title",
        csv_separator=",", distributed=False, batch_size=ROWS, workers=0,
    )  # fmt: skip
    tokenizer = open_clip.get_tokenizer("tiny")
    loader = get_csv_dataset(told, transform, is_train=True, tokenizer=tokenizer).dataloader
    loss_of = SigLipLoss() if kind == "siglip" else open_clip.ClipLoss()
    model = Gathered(clip) if kind == "gathered" else clip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6)

    engine = None
    if config:
        import deepspeed

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config[0])
    losses: list[float] = []
    torch.manual_seed(1)
    for images, texts in (batch for _ in range(EPOCHS) for batch in loader):
        output = (engine or model)(images, texts)
        loss = output if kind == "gathered" else loss_of(**output)
        if engine is None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            engine.backward(loss)
            engine.step()
        with torch.no_grad():
            clip.logit_scale.clamp_(0, math.log(100))
        losses.append(loss.item())

    weights = {name: value.cpu() for name, value in clip.state_dict().items()}
    torch.save({"state_dict": weights}, folder / "epoch_2.pt")
    trained = open_clip.create_model("tiny", pretrained=str(folder / "epoch_2.pt"), **start).eval()
    with torch.no_grad():
        rows = trained.encode_image(images, normalize=True) @ trained.encode_text(texts).T
    result = {"losses": losses, "scale": weights["logit_scale"].item(), "rows": rows.tolist()}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
