"""Scalars of a run, written where DeepSpeed's monitors write them."""

from spmdzero.monitor._master import Event, MonitorMaster

__all__ = ["Event", "MonitorMaster"]
