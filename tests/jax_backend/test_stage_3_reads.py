"""Stage 3 and values that Python reads in a forward: what the devices hold meanwhile."""

import jax
import torch

from tests.engine.test_stage_3 import ALL, WIDTH, WORDS, Tied, batches
from tests.support import engines


class Reads(Tied):
    """Python looks at a value before the first block, and then at what the devices hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.blocks[0].norm.bias.abs().sum().item() < 1e6
        self.held = {array.size for array in jax.live_arrays()}
        return super().forward(x)


def test_what_python_reads_in_the_forward_has_no_parameter_gathered_and_kept() -> None:
    reads = Reads()
    engine = engines.start(reads, zero_optimization=ALL)
    engines.one_call(engine, *batches(1))
    # A table is the smallest of the large ones; each device would hold all of it.
    assert max(reads.held) < 8 * WORDS * WIDTH
