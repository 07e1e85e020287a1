"""Lightning's BoringModel with batches of two rows: a process has those of both devices."""

from typing import Any

from lightning.pytorch.demos import boring_classes
from torch.utils.data import DataLoader


class BoringModel(boring_classes.BoringModel):
    def train_dataloader(self) -> Any:
        return DataLoader(boring_classes.RandomDataset(32, 128), batch_size=2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
