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
        in_step: micro-batches passed since the last boundary, whoever says where it is.
    """

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    counted_from: int = 0
    backwards: int = 0
    in_step: int = 0

    def within_step(self, accumulation: int) -> int:
        """Micro-batches passed of the current step, which has `accumulation` of them."""
        return (self.micro_steps - self.counted_from) % accumulation

    def pass_micro_batch(self) -> None:
        """Counts a micro-batch."""
        self.micro_steps += 1
        self.in_step += 1

    def pass_step(self, *, samples: int, skipped: bool) -> None:
        """Counts a gradient accumulation boundary and the samples of its step."""
        self.global_steps += 1
        self.global_samples += samples
        self.skipped_steps += skipped
        self.backwards = self.in_step = 0

    def restart_step(self) -> None:
        """Forgets the micro-batches of a step that will be done again."""
        self.micro_steps -= self.in_step
        self.backwards = self.in_step = 0
