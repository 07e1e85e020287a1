"""An optimizer's `state` as torch's users treat it: they clear it to start anew."""

from collections import defaultdict
from typing import Any

import torch


class LastingState(torch.optim.Optimizer):
    """An optimizer whose `state` is one dict as long as it lives.

    What is assigned to it is put into that dict, by which a captured step finds its tensors.
    """

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """Parameter -> its states by slot."""
        return vars(self)["_state"]

    @state.setter
    def state(self, value: dict[torch.Tensor, Any]) -> None:
        held = vars(self).setdefault("_state", defaultdict(dict))
        if value is not held:
            held.clear()
            held.update(value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        rest = dict(state)
        self.state = rest.pop("state")
        super().__setstate__(rest)
