"""Writes scalars of a run to the same places as DeepSpeed's monitors."""

from spmdzero.monitor._master import Event, MonitorMaster

__all__ = ["Event", "MonitorMaster"]
