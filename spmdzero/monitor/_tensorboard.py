"""Scalars as TensorBoard event files (DeepSpeed's monitor/tensorboard.py)."""

from pathlib import Path

from spmdzero.config import TensorBoardConfig
from spmdzero.monitor._base import Scalar, library


class TensorBoardMonitor:
    """Writes event files under ``<output_path>/<job_name>``.

    Raises:
        SpmdZeroConfigError: the package tensorboard is not installed.
    """

    def __init__(self, config: TensorBoardConfig) -> None:
        tensorboard = library("torch.utils.tensorboard", section="tensorboard")
        self._writer = tensorboard.SummaryWriter(str(Path(config.output_path) / config.job_name))

    def write(self, scalars: list[Scalar]) -> None:
        """Adds the scalars, at their sample counts."""
        for name, value, samples in scalars:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()
