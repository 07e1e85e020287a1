"""Scalars as CSV files, one for each name (DeepSpeed's monitor/csv_monitor.py)."""

import csv
from pathlib import Path

from spmdzero.config import CsvConfig
from spmdzero.monitor._base import Scalar


class CsvMonitor:
    """Appends to ``<output_path>/<job_name>/Train_Samples_lr.csv`` and its like.

    Each file has the header ``step,<last part of the name>``; a step is counted in samples. A run
    that continues in the same folder appends below the one header; DeepSpeed repeats it.
    """

    def __init__(self, config: CsvConfig) -> None:
        self._folder = Path(config.output_path) / config.job_name
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, scalars: list[Scalar]) -> None:
        """Appends one row for each scalar."""
        for name, value, samples in scalars:
            file = self._folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            with file.open("a", newline="") as stream:
                writer = csv.writer(stream)
                if stream.tell() == 0:
                    writer.writerow(["step", name.rsplit("/", 1)[-1]])
                writer.writerow([samples, value])

    def close(self) -> None:
        """Nothing is open between two writes."""
