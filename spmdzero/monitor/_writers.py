"""Writers of scalars, as in DeepSpeed: CSV files, TensorBoard, Weights & Biases, Comet."""

import csv
import importlib
from pathlib import Path
from types import ModuleType
from typing import Protocol

from spmdzero.config import CometConfig, CsvConfig, TensorBoardConfig, WandbConfig
from spmdzero.errors import SpmdZeroConfigError

Scalar = tuple[str, float, int]
"""Name such as ``"Train/Samples/lr"``, value, samples of all devices so far."""


class Writer(Protocol):
    """A place to which scalars are written."""

    def write(self, scalars: list[Scalar]) -> None:
        """Writes the scalars in their order."""

    def close(self) -> None:
        """Ends the writing."""


class CsvMonitor:
    """Appends to files such as ``<output_path>/<job_name>/Train_Samples_lr.csv``.

    Each file has the header ``step,<last part of the name>``; a step is counted in samples. A run
    that continues in the same folder appends below the header; DeepSpeed repeats the header.
    """

    def __init__(self, config: CsvConfig) -> None:
        self._folder = Path(config.output_path) / config.job_name
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, scalars: list[Scalar]) -> None:
        for name, value, samples in scalars:
            file = self._folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            with file.open("a", newline="") as stream:
                writer = csv.writer(stream)
                if stream.tell() == 0:
                    writer.writerow(["step", name.rsplit("/", 1)[-1]])
                writer.writerow([samples, value])

    def close(self) -> None:
        """Does nothing: no file is open between two writes."""


class TensorBoardMonitor:
    """Writes event files under ``<output_path>/<job_name>``."""

    def __init__(self, config: TensorBoardConfig) -> None:
        tensorboard = _library("torch.utils.tensorboard", section="tensorboard")
        self._writer = tensorboard.SummaryWriter(str(Path(config.output_path) / config.job_name))

    def write(self, scalars: list[Scalar]) -> None:
        for name, value, samples in scalars:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbMonitor:
    """Starts a run of the config's project, group and team, and logs to it.

    ``WANDB_MODE=offline`` keeps the run on disk.
    """

    def __init__(self, config: WandbConfig) -> None:
        wandb = _library("wandb", section="wandb")
        self._run = wandb.init(project=config.project, group=config.group, entity=config.team)

    def write(self, scalars: list[Scalar]) -> None:
        for name, value, samples in scalars:
            self._run.log({name: value}, step=samples)

    def close(self) -> None:
        self._run.finish()


class CometMonitor:
    """Starts an experiment of Comet, and logs a scalar each ``samples_log_interval`` samples."""

    def __init__(self, config: CometConfig) -> None:
        comet = _library("comet_ml", section="comet")
        self._interval, self._last = config.samples_log_interval, dict[str, int]()
        self._experiment = comet.start(
            api_key=config.api_key,
            project=config.project,
            workspace=config.workspace,
            experiment_key=config.experiment_key,
            mode=config.mode,
            online=config.online,
        )
        if config.experiment_name is not None:
            self._experiment.set_name(config.experiment_name)

    def write(self, scalars: list[Scalar]) -> None:
        for name, value, samples in scalars:
            if samples - self._last.get(name, samples - self._interval) >= self._interval:
                self._last[name] = samples
                self._experiment.log_metric(name, value, step=samples)

    def close(self) -> None:
        self._experiment.end()


def _library(name: str, *, section: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SpmdZeroConfigError(
            key=f"{section}.enabled",
            value=True,
            reason=f"this monitor needs a package that is not installed ({error})",
            fix=f"Install it: pip install 'spmdzero[{section}]', or write false.",
        ) from None
