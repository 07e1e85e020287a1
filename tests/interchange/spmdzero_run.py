"""spmdzero on this process's devices: loads, trains, saves; prints the results as one JSON line.

`CPU_NUM_DEVICES=2 python -m tests.interchange.spmdzero_run '[order, ...]'`, with the orders of
`deepspeed_rank` and in them ``"save_as"``, a list of ``"universal"`` and ``"deepspeed"``, and
``"ranks"``, for which the latter is.
"""

import json
import sys
from typing import Any

from tests.interchange.cases import CASES, CLIENT_STATE, config_of, model_of
from tests.oracle.model import make_batch
from tests.support.processes import run_module


def run(orders: list[dict[str, Any]], *, devices: int) -> list[dict[str, Any]]:
    """Carries the orders out on that many devices, in one new process."""
    printed = run_module("tests.interchange.spmdzero_run", json.dumps(orders), devices=devices)
    return json.loads(printed.splitlines()[-1])


def train(order: dict[str, Any], devices: int) -> dict[str, Any]:
    """What a script sees of one order."""
    import spmdzero

    case = CASES[order["case"]]
    model, groups = model_of(case)
    config = config_of(case, ranks=devices) | {"spmd": {"min_shard_elements": 64}}
    if order["stage"] is not None:
        config["zero_optimization"] = config["zero_optimization"] | {"stage": order["stage"]}
    engine, *_ = spmdzero.initialize(model=model, model_parameters=groups, config=config)
    path, client_state = None, {}
    if order["load"]:
        path, client_state = engine.load_checkpoint(order["load"])
    losses = []
    for step in range(order["start"], order["start"] + order["steps"]):
        if order["save"] and step == order["save_at"]:
            _save(engine, order)
        loss = engine(*make_batch(step, 0))
        engine.backward(loss)
        engine.step()
        losses.append(loss)
    return {
        "losses": [loss.item() for loss in losses],
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "lr": engine.get_lr(),
        "client_state": sorted(client_state),
        "path": path,
    }


def _save(engine: Any, order: dict[str, Any]) -> None:
    for layout in order["save_as"]:
        engine.save_deepspeed_checkpoint(
            order["save"],
            client_state=CLIENT_STATE,
            universal=layout == "universal",
            ranks=order["ranks"],
        )


def main() -> None:
    """Runs the orders of argv[1]."""
    from spmdzero.backend.torch_xla import runtime

    runtime.start()
    devices = runtime.device_count()
    print(json.dumps([train(order, devices) for order in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
