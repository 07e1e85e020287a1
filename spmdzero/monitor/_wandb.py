"""Scalars in Weights & Biases (DeepSpeed's monitor/wandb.py)."""

from spmdzero.config import WandbConfig
from spmdzero.monitor._base import Scalar, library


class WandbMonitor:
    """Starts a run of the config's project, group and team, and logs to it.

    ``WANDB_MODE=offline`` keeps the run on disk.

    Raises:
        SpmdZeroConfigError: the package wandb is not installed.
    """

    def __init__(self, config: WandbConfig) -> None:
        self._wandb = library("wandb", section="wandb")
        self._run = self._wandb.init(project=config.project, group=config.group, entity=config.team)

    def write(self, scalars: list[Scalar]) -> None:
        """Logs the scalars, at their sample counts."""
        for name, value, samples in scalars:
            self._run.log({name: value}, step=samples)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()
