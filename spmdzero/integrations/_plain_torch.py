"""Says that a program trains by plain torch, with no engine and thus none of the devices."""

import logging
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from spmdzero._logging import is_new
from spmdzero.backend import is_chosen

logger = logging.getLogger("spmdzero")
# A line that says more, of a Trainer whose arguments name no config, is enough.
PLAIN = "plain torch"


def watch_steps() -> None:
    """Warns at the first step of an optimizer of torch, if there is no engine by then."""

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        handle.remove()
        # Proofs of `initialize` step optimizers, too, after a backend was chosen.
        if not is_chosen() and is_new(PLAIN):
            logger.warning(
                "%s.step() trains by plain torch, without spmdzero and its devices: no engine was "
                "made. Where the program has a setting for DeepSpeed, name a config there; in a "
                "loop of your own call deepspeed.initialize(model=..., config=...)",
                type(optimizer).__name__,
            )

    handle = register_optimizer_step_post_hook(stepped)
