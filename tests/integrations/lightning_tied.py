"""Fits a model with a tied head twice with Lightning; prints what is tied then."""

import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spmdzero.integrations.lightning  # noqa: F401


class Tied(lightning.LightningModule):
    """Predicts its input; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 64), nn.Linear(64, 16, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss."""
        return F.cross_entropy(self.head(self.embed(batch[0])), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """One line for each fit: whether the weights are tied, and on which device."""
    warnings.simplefilter("ignore")
    model = Tied()
    for _ in range(2):
        trainer = lightning.Trainer(
            strategy="spmdzero",
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(TensorDataset(torch.arange(16)), batch_size=8))
        print("fit", model.head.weight is model.embed.weight, model.head.weight.device)


if __name__ == "__main__":
    main()
