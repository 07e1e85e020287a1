"""Prints what a process that nobody joins finds.

`python -m tests.hosts.alone [SECONDS]`, for which it waits for those that its environment names.
"""

import datetime
import json
import signal
import sys

import spmdzero
from spmdzero.backend import runtime
from spmdzero.backend.hosts import processes


def main() -> None:
    # What a shell starts in the background, such as the tests, ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = [datetime.timedelta(seconds=float(text)) for text in sys.argv[1:]]
    spmdzero.init_distributed(timeout=(*given, processes.TIMEOUT)[0])
    found = {
        "processes": runtime.process_count(),
        "world": spmdzero.comm.get_world_size(),
        "devices": runtime.device_count(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
