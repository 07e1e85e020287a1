"""Trains, makes one file of the folder that was saved, and loads it by Lightning's own ways."""

import sys
from pathlib import Path
from typing import Any

import spmdzero.integrations.lightning  # noqa: F401  # isort: skip

import lightning
import torch
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Linear(4, width)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.body(batch[0].to(self.body.weight.dtype)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    module = Regression(3)
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="spmdzero", precision="bf16-mixed", max_steps=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4))
    trainer.save_checkpoint(folder / "saved")
    told = convert_zero_checkpoint_to_fp32_state_dict(folder / "saved", folder / "one.ckpt")

    loaded = Regression.load_from_checkpoint(folder / "one.ckpt", weights_only=False)
    assert loaded.hparams["width"] == 3
    written = torch.load(folder / "one.ckpt", weights_only=False)
    assert written.keys() == told.keys()
    assert (written["global_step"], "optimizer_states" in written) == (2, False)
    for name, weight in loaded.state_dict().items():
        assert weight.dtype == torch.float32
        # The masters, of which the module's bf16 is the rounding.
        assert not torch.equal(weight, weight.bfloat16().float())
        assert torch.equal(weight.bfloat16(), module.state_dict()[name]), name

    tag = convert_zero_checkpoint_to_fp32_state_dict(
        folder / "saved", folder / "named.ckpt", tag="checkpoint"
    )
    assert tag.keys() == told.keys()
    print(f"one file of {sorted(told['state_dict'])}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
