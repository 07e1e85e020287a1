"""DeepSpeed's command-line arguments."""

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the arguments that `deepspeed.add_config_arguments` adds, with its defaults.

    `--deepspeed` (and its old name `--deepscale`) is a flag for the script's own use;
    `--deepspeed_config` names the JSON that `initialize(args=...)` reads.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed",
        action="store_true",
        help="accepted so that launch scripts keep working; initialize() needs no switch",
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed JSON file")
    group.add_argument("--deepscale", action="store_true", help="old name of --deepspeed")
    group.add_argument(
        "--deepscale_config", default=None, type=str, help="old name of --deepspeed_config"
    )
    return parser
