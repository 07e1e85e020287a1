"""The environment of a test's child processes."""

import os


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what running tests left in it, and `more`.

    A child that inherits these has SPMD on from the start, and dumps optimised programs only.
    """
    left = ("XLA_USE_SPMD", "XLA_DUMP_POST_OPTIMIZATIONS")
    return {name: value for name, value in os.environ.items() if name not in left} | more
