"""What steps of a LightningModule do beside training.

`python -m tests.integrations.lightning_features NAME...` prints what came of it. A name is that of
a class here, which is trained for some batches of 16 rows.
"""

import json
import logging
import sys
from typing import Any, ClassVar

import spmdzero.integrations

# Lightning imports transformers, which looks for torch_xla.
spmdzero.integrations.install()

# ruff: noqa: E402
import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from spmdzero.integrations.lightning import SpmdZeroStrategy

inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
ROWS = TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Base(lightning.LightningModule):
    epochs = 1
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.squared = MeanSquaredError()
        self.both = MetricCollection(
            {"squared": MeanSquaredError(), "absolute": MeanAbsoluteError()}
        )
        self.kept: list[torch.Tensor] = []
        self.seen: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.body(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        values = {k: float(v) for k, v in self.trainer.callback_metrics.items()}
        self.seen.append([float(outputs["loss"]), values])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ReturnsMetric(Base):
    """A metric's value is returned, and found by a hook."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "squared": self.squared(self.body(batch[0]), batch[1])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([float(outputs["loss"]), float(outputs["squared"])])


class Collects(Base):
    """A collection of metrics is logged, and a list kept for the end of the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict(self.both(self.body(batch[0]), batch[1]))
        loss = self.loss(batch)
        self.kept.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(torch.stack(self.kept).mean()))


class ReadsEpoch(Base):
    """Python chooses its way by the epoch."""

    epochs = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        factor = 1.0 if self.current_epoch == 0 else 0.5
        self.log("factor", factor)
        return self.loss(batch) * factor


class ReadsIndex(Base):
    """Python chooses its way by the batch's number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (2.0 if batch_idx == 4 else 1.0)


class ReadsList(Base):
    """Python chooses its way by a list that it also extends."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append(batch[0].mean())
        return self.loss(batch) * float(len(self.kept))


class ComputesWithMetric(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.squared(self.body(batch[0]), batch[1])


class LogsCount(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("positive", (self.body(batch[0]) > 0).sum())
        return self.loss(batch)


class LogsSum(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("sum", self.loss(batch), sync_dist=True, reduce_fx="sum")
        return self.loss(batch)


class LogsMaximum(Base):
    """Of a mean it would do; that it is one can't be known."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("maximum", loss, on_epoch=True, reduce_fx="max")
        return loss


class MaximumOfMetric(Base):
    """A metric's value is one of all rows, of which there may be a maximum."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        error = self.squared(self.body(batch[0]), batch[1])
        self.log("maximum", error, on_step=True, on_epoch=True, reduce_fx="max")
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["maximum_epoch"]))


class SkipsStep(Base):
    """One of the batches that are accumulated is left out, and yet counted."""

    options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.squared.update(self.body(batch[0]), batch[1])
        return self.loss(batch) if batch_idx != 2 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]) if outputs else -1.0)

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.squared.compute()))


class Gathers(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(self.loss(batch)).mean()


class Monitored(Base):
    """Learning rates are logged by the name of the script's optimizer, without a schedule."""

    schedule = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        if not self.schedule:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen[-1][1] = LearningRateMonitor("step")._extract_stats(self.trainer, "any")


class MonitoredSchedule(Monitored):
    """The same, with a schedule."""

    schedule = True


class Manual(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def trained(module: Base, **options: Any) -> lightning.Trainer:
    torch.manual_seed(0)
    # Afresh, with this seed.
    module.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    told: dict[str, Any] = {"accelerator": "cpu", "strategy": "spmdzero", "logger": False}
    trainer = lightning.Trainer(
        max_epochs=module.epochs, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **(told | module.options | options),
    )  # fmt: skip
    trainer.fit(module, DataLoader(ROWS, batch_size=16))
    return trainer


def after_training(name: str) -> dict[str, Any]:
    """What a trainer and its module are good for when it has trained."""
    module = Base()
    trainer = trained(module)
    loader = DataLoader(ROWS, batch_size=16)
    trained_once = {key: value.clone() for key, value in module.state_dict().items()}
    trainer.save_checkpoint(f"{name}/after.ckpt")
    module.predict_step = lambda batch, batch_idx: module.body(batch[0])
    rows = torch.cat(trainer.predict(module, loader, ckpt_path=f"{name}/after.ckpt"))
    module.load_state_dict(trained_once)
    return {
        "device": str(next(module.parameters()).device),
        "type": type(rows).__name__,
        "same": bool(torch.allclose(rows, module.body(inputs), atol=1e-6)),
    }


def names_of_rates(folder: str, *, schedule: bool) -> list[str]:
    """What `LearningRateMonitor` calls the rates of a DeepSpeed config's optimizer."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
    }
    if schedule:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    monitor = LearningRateMonitor()
    trained(
        Base(),
        strategy=SpmdZeroStrategy(config=config),
        callbacks=[monitor],
        logger=CSVLogger(folder),
        limit_train_batches=2,
    )
    return [*monitor.lrs]


def outcome(name: str) -> Any:
    if name.startswith("named:"):
        _, folder, schedule = name.split(":")
        return names_of_rates(folder, schedule=schedule == "True")
    if name.startswith("after:"):
        return after_training(name.removeprefix("after:"))
    options = json.loads(name) if name.startswith("{") else {}
    kind = Base if options else globals()[name]
    try:
        module = kind()
        trainer = trained(module, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    plain = kind()
    trained(plain, strategy="auto", devices=1)
    folding = trainer.strategy.deepspeed_engine.capture
    return {"ours": module.seen, "plain": plain.seen, "folded": folding.folded}


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(json.dumps({name: outcome(name) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
