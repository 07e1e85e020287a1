"""spmdzero on this process's devices: loads, trains, saves; prints the results as one JSON line.

`CPU_NUM_DEVICES=2 python -m tests.interchange.spmdzero_run '[order, ...]'`, with the orders of
`deepspeed_rank` and in them ``"save_as"``, a list of ``"universal"`` and ``"deepspeed"``, and
``"ranks"``, for which the latter is.
"""

import json
import sys
from typing import Any

from tests.interchange.cases import CASES, CLIENT_STATE, config_of, model_of, run_order
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
    config = config_of(case, ranks=devices, stage=order["stage"], autotp=order["autotp"])
    config |= {"spmd": {"min_shard_elements": 64}}
    engine, *_ = spmdzero.initialize(model=model, model_parameters=groups, config=config)

    def save() -> None:
        for layout in order["save_as"]:
            engine.save_deepspeed_checkpoint(
                order["save"],
                client_state=CLIENT_STATE,
                universal=layout == "universal",
                ranks=order["ranks"],
            )

    seen = run_order(engine, order, slice(None), save)
    return seen | {"losses": [loss.item() for loss in seen["losses"]]}


def main() -> None:
    """Runs the orders of argv[1]."""
    from spmdzero.backend import runtime

    runtime.start()
    devices = runtime.device_count()
    print(json.dumps([train(order, devices) for order in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
