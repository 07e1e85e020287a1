"""An engine's outputs as the script on one of several hosts sees them."""

from typing import Any

import torch

from spmdzero.backend import Across, RegionRules, arrays, keep_same, map_tensors, to_own_rows


class HostOutputs:
    """Hands each host its own rows of batches, and the same values of all other outputs.

    Args:
        across: moves values between the hosts.
        rules: which outputs are batches, and in which dim; None after a global forward, where all
            outputs are left as they are.
    """

    def __init__(self, across: Across, rules: RegionRules | None) -> None:
        self._across, self._rules = across, rules

    def __call__(self, output: Any) -> Any:
        """The global `output` as this host's script sees it."""
        return map_tensors(output, self._leave)

    def _leave(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not arrays.is_mine(tensor):
            return tensor
        rules = self._rules
        # Only a batch leaves the region with a dim, unless an output is declared.
        if rules and rules.outputs.get(path, "batch" if tensor.dim() else "mean") == "batch":
            return to_own_rows(tensor, rules.batch_dim, self._across)
        return keep_same(tensor, self._across)
