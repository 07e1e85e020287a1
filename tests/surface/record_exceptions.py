"""Records which type real DeepSpeed raises into tests/data/deepspeed_exceptions.json.

Needs deepspeed==0.19.8: `DS_ACCELERATOR=cpu python -m tests.surface.record_exceptions`. One process
with one rank. Of DeepSpeed's own types the nearest of Python's is recorded.
"""

import json
import os
from pathlib import Path

from tests.surface.calls_that_raise import Calls, raised

DATA = Path(__file__).parents[1] / "data" / "deepspeed_exceptions.json"


def name_of(kind: type[Exception] | None) -> str | None:
    """Python's own type that `kind` is, or is derived from."""
    if kind is None:
        return None
    return next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")


def main() -> None:
    """Records each call."""
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29633"
    )
    import deepspeed
    from deepspeed.runtime import lr_schedules

    calls = Calls(deepspeed, lr_schedules).all()
    recorded = {name: name_of(raised(call)) for name, call in calls.items()}
    DATA.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
