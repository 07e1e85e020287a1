"""DeepSpeed's counters."""

import dataclasses


@dataclasses.dataclass
class Counters:
    """How far training has come.

    Attributes:
        micro_steps: micro-batches passed.
        global_steps: gradient accumulation boundaries passed, skipped updates included.
        global_samples: samples of all devices, counted at boundaries.
        skipped_steps: of them those that an overflow skipped, where that is known without a read.
        counted_from: `micro_steps` when the accumulation steps were last changed.
        backwards: `engine.backward` calls since the last step.
    """

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    counted_from: int = 0
    backwards: int = 0

    def within_step(self, accumulation: int) -> int:
        """Micro-batches passed of the current step, which has `accumulation` of them."""
        return (self.micro_steps - self.counted_from) % accumulation
