"""What a step reads of its trainer, by which its Python may choose its way."""

import logging
from typing import Any

from spmdzero._logging import is_new

logger = logging.getLogger("spmdzero")
_PLAIN = (str, int, float, bool, type(None))


class ChangesAtEachStep:
    """Among the inputs of a forward, it says that none can stand for the next."""


class TrainerReads:
    """Stands for `trainer` inside of steps, and remembers what they read of it.

    A step that is replayed runs no Python. So the plain values that it reads, such as
    `self.current_epoch`, go among its inputs: another value is another program. A step that reads
    anything else, such as an optimizer, is traced each time.
    """

    def __init__(self, trainer: Any) -> None:
        vars(self).update(_trainer=trainer, _names=dict[str, None](), _changing=False)

    def now(self) -> dict[str, Any]:
        """What steps have read so far, as it is now."""
        if self._changing:
            return {"": ChangesAtEachStep()}
        return {name: getattr(self._trainer, name) for name in self._names}

    def note_changing(self, what: str) -> None:
        """Has steps traced each time, as they read `what`."""
        vars(self)["_changing"] = True
        if is_new(("trainer reads", what)):
            logger.info(
                "training_step runs as Python at each step, which takes longer than to start what "
                "was compiled, because it reads %s",
                what,
            )

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if isinstance(value, _PLAIN):
            self._names[name] = None
        else:
            self.note_changing(f"self.trainer.{name}")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self.note_changing(f"self.trainer, to set {name}")
        setattr(self._trainer, name, value)
