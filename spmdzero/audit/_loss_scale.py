"""Finds a loss whose scale depends on the number of devices.

A loss of the model is computed again: with each row of a device twice, a mean over rows stays the
same to rounding, even if rows are masked, and a sum doubles. A loss that compares the rows of a
batch with each other grows too, but not linearly, which a third forward shows. For a loss that a
script computes, its graph is read.
"""

import logging
import math

from spmdzero.audit._report import Finding
from spmdzero.engine import RepeatedRows

logger = logging.getLogger("spmdzero")

# Smallest relative growth of a sum. A mean that is rounded to bf16 moves by a hundredth at most.
_PART = 0.1
# Largest relative distance of the growth from linear; a contrastive loss has 0.26.
_OFF_LINE = 0.1


def loss_scale(rows: RepeatedRows | None, *, devices: int) -> list[Finding]:
    """Findings about scalars with a gradient that leave the region as a mean, but sum over rows.

    Args:
        rows: a forward that can be repeated, or None.
        devices: number of devices over which the mean is taken.
    """
    if rows is None:
        return []
    try:
        once = rows.losses(times=1)
        twice = rows.losses(times=2) if once else {}
        grown = [path for path, value in once.items() if _grown(value, twice.get(path)) > _PART]
        thrice = rows.losses(times=3) if grown else {}
    except Exception as error:
        logger.warning(
            "the audit can't tell whether the loss depends on the number of devices: with each row "
            "of a device more than once, the forward raised %s: %s", type(error).__name__, error
        )  # fmt: skip
        return []
    return [
        _finding(path, twice[path] / once[path], thrice[path] / once[path], devices)
        for path in grown
        if _is_line(once[path], twice[path], thrice.get(path, math.nan))
    ]


def _grown(once: float, twice: float | None) -> float:
    """Relative growth of a loss; 0 if the loss is 0, not finite, or missing the second time."""
    part = (twice - once) / once if once and twice is not None else 0.0
    return part if math.isfinite(part) else 0.0


def _is_line(once: float, twice: float, thrice: float) -> bool:
    growth = thrice - once
    return abs(growth - 2 * (twice - once)) < _OFF_LINE * abs(growth)


def _finding(path: str, twice: float, thrice: float, devices: int) -> Finding:
    return Finding(
        name="loss-scale",
        severity="error",
        subject=f"output {path!r} of the model" if path else "the loss that the model returns",
        cause="it is a sum over the rows that a device sees, perhaps divided by a number that was "
        "given from outside, and leaves the forward as the mean over devices: of the same batch, "
        f"{devices} devices make 1/{devices} of the loss and of the gradient that one makes",
        fix="divide in the model's forward by the rows, or labels, that it sees there; or "
        f'"spmd": {{"outputs": {{"{path}": "sum"}}}}, which adds up the devices\' sums ("mean" '
        "says that their mean is what you want); where transformers hands in num_items_in_batch, "
        "train through spmdzero.integrations, which divides it",
        evidence=f"with each row of a device twice it is {twice:.3g} times as large, with each "
        f"three times {thrice:.3g} times; a mean would stay",
    )


def summed_outside(node: str | None, *, devices: int) -> list[Finding]:
    """A finding about a script's own loss that sums over the rows of the engine's outputs.

    Args:
        node: name of autograd's node that sums, or None.
        devices: number of devices whose rows the loss sees.
    """
    if node is None:
        return []
    return [
        Finding(
            name="loss-scale",
            severity="error",
            subject="the loss that engine.backward was given",
            cause="it is computed outside of the model, from the rows of all devices, and sums "
            f"over them: its gradient is {devices} times DeepSpeed's, whose {devices} ranks sum "
            "their own rows each, and use the mean of their gradients",
            fix="divide by the number of rows or labels; or, for DeepSpeed's number, "
            "engine.backward(loss / engine.dp_world_size); or compute the loss in the model's "
            'forward, as "spmd": {"outputs"} says',
            evidence=f"{node} takes the batch dim away in the loss's graph, and nothing divides or "
            "multiplies after it",
        )
    ]
