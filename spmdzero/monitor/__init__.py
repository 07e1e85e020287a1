"""Scalars of a run, written where DeepSpeed's monitors write them."""

from spmdzero.monitor._csv import CsvMonitor
from spmdzero.monitor._master import Event, MonitorMaster
from spmdzero.monitor._tensorboard import TensorBoardMonitor
from spmdzero.monitor._wandb import WandbMonitor

__all__ = ["CsvMonitor", "Event", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor"]
