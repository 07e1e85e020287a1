"""Named random states, which Megatron's models get from the checkpointing module."""

import contextlib
import copy
from collections.abc import Iterator

import torch

from spmdzero.backend import follow_named_states
from spmdzero.errors import SpmdZeroUsageError

MODEL_PARALLEL = "model-parallel-rng"


class CudaRNGStatesTracker:
    """Named random states of the CPU generator, from which every device draws.

    A checkpointed function that forks one draws the same numbers when backward runs it again, under
    `checkpoint` and torch.utils.checkpoint.
    """

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()
        follow_named_states(self)

    def reset(self) -> None:
        """Forgets all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Name -> state; a copy of the dict."""
        return copy.copy(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replaces all states by `states`, which `get_states` returned."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Adds a state that starts from `seed`.

        Raises:
            SpmdZeroUsageError: the name or the seed is taken.
        """
        if seed in self.seeds_ or name in self.states_:
            raise SpmdZeroUsageError(
                f"the random state {name!r} or the seed {seed} was added before: call reset() first"
            )
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draws from the state `name` inside the context; the next fork continues from its end.

        Raises:
            SpmdZeroUsageError: there is no such state.
        """
        if name not in self.states_:
            raise SpmdZeroUsageError(
                f"there is no random state {name!r}: add it, or call "
                "model_parallel_cuda_manual_seed(seed)"
            )
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the generator, and with DeepSpeed's offset the tracker's model-parallel state.

    The offset is that of the only model-parallel rank: `seed + 2718`
    (runtime/activation_checkpointing/checkpointing.py).
    """
    _TRACKER.reset()
    torch.manual_seed(seed)
    _TRACKER.add(MODEL_PARALLEL, seed + 2718)
