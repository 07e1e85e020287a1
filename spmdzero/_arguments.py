"""DeepSpeed's command-line arguments, and the early switch to SPMD."""

import argparse
from typing import Any

from spmdzero.xla import runtime


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed`` and ``--deepspeed_config``, as `deepspeed.add_config_arguments` does."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed",
        action="store_true",
        help="accepted so that launch scripts keep working; initialize() needs no switch",
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed JSON file")
    return parser


def init_distributed(*_: Any, **__: Any) -> None:
    """Switches SPMD on; call it before the first use of an XLA device.

    There is one process for each host, and the TPU runtime connects them: DeepSpeed's arguments
    (backend, port, timeout, rank) have nothing to configure and are accepted.

    Raises:
        SpmdZeroRuntimeError: a device was used already.
    """
    runtime.start()
