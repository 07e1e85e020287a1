"""When the host reads whether the replicas agree on what must be the same on all of them."""

EVERY = 64


class AgreementRhythm:
    """Says after which micro-batches to read it: the powers of two up to 64, and then each 64th.

    The devices remember a disagreement, so a late read misses none; but each waits for them.
    A model that has no integer output or buffer has nothing to read.
    """

    def __init__(self) -> None:
        self._passed = 0

    def is_due(self) -> bool:
        """Counts one micro-batch; returns whether to read after it."""
        self._passed += 1
        few = self._passed < EVERY
        # A power of two has one bit.
        return self._passed.bit_count() == 1 if few else self._passed % EVERY == 0
