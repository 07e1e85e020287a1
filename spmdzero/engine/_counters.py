"""DeepSpeed's counters."""

import dataclasses


@dataclasses.dataclass
class Counters:
    """How far training has come.

    Attributes:
        micro_steps: micro-batches passed.
        global_steps: gradient accumulation boundaries passed, skipped updates included.
        global_samples: samples of all devices, counted at boundaries.
    """

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
