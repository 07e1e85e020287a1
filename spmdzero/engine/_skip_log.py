"""A line in the log for steps that left the weights alone, at the first read that knows of them."""

import logging

logger = logging.getLogger("spmdzero")


class SkipLog:
    """Tells each skipped step once; nothing is read from the devices for it.

    Attributes:
        told: skipped steps that were told, or that a loaded checkpoint had.
    """

    def __init__(self) -> None:
        self.told = 0
        self._since = 0

    def tell(
        self, skipped: int, *, step: int, since: int | None = None, level: int = logging.WARNING
    ) -> None:
        """Takes note of the count of skipped steps, as it was just read.

        Args:
            skipped: the count.
            step: steps that were done by then.
            since: steps that were done at the read before, None for that of the latest call.
            level: of the line.
        """
        new, last = skipped - self.told, step - 1
        first = self._since if since is None else since
        if new > 0:
            where = (
                f"step {last} was" if first >= last else f"{new} of steps {first} to {last} were"
            )
            logger.log(
                level,
                "%s skipped: the gradient was not finite, parameters and optimizer states are as "
                "they were",
                where,
            )
        self.told, self._since = skipped, step

    def restart(self, skipped: int, *, step: int) -> None:
        """Goes on from a checkpoint with these counts."""
        self.told, self._since = skipped, step
