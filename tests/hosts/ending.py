"""Trains, and one host ends on the way: it is killed, freezes, raises, ...

`python -m tests.hosts.ending WAY HOST FOLDER TIMEOUT`. FOLDER gets a checkpoint before.
"""

import os
import signal
import sys
import time

import spmdzero
from spmdzero.backend import runtime
from tests.hosts.training import engine_of, rows, step_of


def end(way: str, engine: spmdzero.Engine, folder: str) -> None:
    """Ends this host, or has it wait for the others where they wait for it."""
    if way == "saves":
        engine.save_checkpoint(folder)
    if way == "hands over other rows":
        engine.eval()
        engine(*(tensor[:1] for tensor in rows(0))).item()
        engine.train()
        return
    if way == "reads alone":
        loss = engine(*rows(7))
        loss.item()
        engine.backward(loss)
        engine.step()
        return
    if way == "raises":
        raise ValueError("row 7 has no label")
    if way == "exits":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL if way == "killed" else signal.SIGSTOP)


def main() -> None:
    way, host, folder, timeout = sys.argv[1:]
    case = {"config": {"spmd": {"timeout": float(timeout)}}}
    engine = engine_of(case)
    for step in range(1000):
        if step == 5:
            engine.save_checkpoint(folder)
            print("saved", flush=True)
        if step == 7 and runtime.process_index() == int(host):
            end(way, engine, folder)
        step_of(engine, step, case)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
