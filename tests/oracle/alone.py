"""Starts DeepSpeed in this process alone, for scripts that record it."""

import os


def start_deepspeed(*, port: int) -> None:
    """Initialises DeepSpeed's process group of one process on gloo."""
    os.environ |= {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    import deepspeed

    deepspeed.init_distributed("gloo")
