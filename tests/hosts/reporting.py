"""Trains with everything on that reports; each host prints its own lines too.

`python -m tests.hosts.reporting FOLDER`.
"""

import json
import sys

import spmdzero
from spmdzero.backend import runtime
from tests.hosts.training import engine_of, rows


def main() -> None:
    folder = sys.argv[1]
    config = {
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": True, "profile_step": 2},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine = engine_of({"config": config})
    losses = []
    for step in range(5):
        loss = engine(*rows(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    losses += [engine.train_batch(iter([rows(step)])).item() for step in range(5)]
    rank = runtime.process_index()
    spmdzero.logger.info("my own line of host %d", rank)
    spmdzero.log_dist("said by the second", ranks=[1])
    spmdzero.logger.warning("a warning of host %d", rank)
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
