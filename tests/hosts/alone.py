"""Prints what a process that nobody joins finds."""

import json

import spmdzero
from spmdzero.backend import runtime


def main() -> None:
    spmdzero.init_distributed()
    found = {
        "processes": runtime.process_count(),
        "world": spmdzero.comm.get_world_size(),
        "devices": runtime.device_count(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
