"""The environment of a test's child processes."""

import os


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what torch_xla left in it, and `more`.

    `use_spmd()` sets a variable, and a child that inherits it has SPMD on from the start.
    """
    own = {name: value for name, value in os.environ.items() if name != "XLA_USE_SPMD"}
    return own | more
