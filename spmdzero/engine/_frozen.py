"""Warns once that a parameter was frozen or unfrozen after the plan was made."""

import logging

import torch

from spmdzero._names import listed
from spmdzero.state._training import Training

logger = logging.getLogger("spmdzero")


class FreezeWatch:
    """Compares the parameters that require a gradient with those that the plan trains."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._seen = self._now()
        self._said: set[str] = set()

    def look(self) -> None:
        """Logs a warning that names the parameters that changed; each parameter once."""
        now = self._now()
        if now == self._seen:
            return
        names = list(self._training.state.parameters)
        changed = [n for n, old, new in zip(names, self._seen, now, strict=True) if old != new]
        requires, self._seen = dict(zip(names, now, strict=True)), now
        planned = self._training.plan
        self._say(
            [name for name in changed if requires[name] and not planned[name].trainable],
            "%s: requires_grad was turned on after initialize, whose plan doesn't train it. It "
            "stays as it is, as in DeepSpeed. Turn it on before initialize, and off afterwards",
        )
        self._say(
            [name for name in changed if not requires[name] and planned[name].trainable],
            "%s: requires_grad was turned off after initialize, whose plan trains it. Its gradient "
            "counts as zero, as in DeepSpeed: weight decay and momentum still move it",
        )

    def _say(self, names: list[str], message: str) -> None:
        new = [name for name in names if name not in self._said]
        self._said.update(new)
        if new:
            logger.warning(message, listed(new, most=5))

    def _now(self) -> list[bool]:
        # A subclass of torch's tensors would run Python for each parameter, at each step.
        with torch._C.DisableTorchFunctionSubclass():
            return [p.requires_grad for p in self._training.state.parameters.values()]
