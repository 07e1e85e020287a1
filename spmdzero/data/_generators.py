"""The states of this process's random generators."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from spmdzero.backend import current, runtime


def host_generators() -> dict[str, Any]:
    """The states of torch's CPU generator, numpy's and Python's, by name; they may be saved."""
    numpy = np.random.get_state(legacy=False)
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "python": [version, list(words), gauss],
    }


def generators() -> dict[str, Any]:
    """Those of the host, and the devices' own."""
    return {**host_generators(), current().device_type: runtime.generator_state()}


def set_generators(states: Mapping[str, Any]) -> None:
    """Continues the generators whose states are there."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "numpy" in states:
        saved = states["numpy"]
        key = np.array(saved["state"]["key"], dtype=np.uint32)
        np.random.set_state({**saved, "state": {**saved["state"], "key": key}})
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
    own = current().device_type
    if own in states:
        runtime.seed(states[own])
