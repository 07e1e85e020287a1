"""Google Cloud's slices of each TPU generation, with their names.

Shapes and hosts are those of https://cloud.google.com/tpu/docs/v5e and of the other generations'
pages; machines of four chips of v5e and v6e are those of
https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus. The number in a name counts
cores: `v5p-16` has 8 chips of two cores each.
"""

import re
from math import prod

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(
        ("v5e", "v6e"), ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
    ),
    **dict.fromkeys(
        ("v4", "v5p", "tpu7x"),
        ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8),
         (8, 8, 16), (8, 16, 16)),
    ),
}  # fmt: skip
"""Generation -> chips along each direction of its slices, the smallest first."""

_CORES = {"v4": 2, "v5p": 2, "tpu7x": 2}
_CLOUD = {"v5e": "v5litepod"}
_NAME = re.compile(r"(?P<chip>(?:v|tpu)\d+\w*?)-(?P<cores>\d+)")
_CHIPS_A_HOST = 4
# These have hosts of eight chips besides. Only a whole slice is one.
_ALONE = dict.fromkeys(("v5e", "v6e"), (2, 4))
# Google Kubernetes Engine's machines of four chips. Cloud TPU's own API ends before tpu7x.
_MACHINES = {"v5e": "ct5lp-hightpu-4t", "v6e": "ct6e-standard-4t", "tpu7x": "tpu7x-standard-4t"}
_WITHOUT_CLOUD_TPU = ("tpu7x",)


def cloud_name(chip: str, shape: tuple[int, ...]) -> str:
    """Google Cloud's name of a slice, such as ``v5litepod-16`` for 4x4 chips of v5e."""
    return f"{_CLOUD.get(chip, chip)}-{prod(shape) * _CORES.get(chip, 1)}"


def named_slice(name: str) -> tuple[str, tuple[int, ...]] | None:
    """Generation and shape of a slice by Google Cloud's name or JAX's (``v5e-16``), or None."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    chip = {cloud: own for own, cloud in _CLOUD.items()}.get(found["chip"], found["chip"])
    for shape in SHAPES.get(chip, ()):
        if prod(shape) * _CORES.get(chip, 1) == int(found["cores"]):
            return chip, shape
    return None


def hosts_of(chip: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of hosts that a slice comes with, the usual first; a process runs on each host."""
    fours = max(1, prod(shape) // _CHIPS_A_HOST)
    return (1, fours) if shape == _ALONE.get(chip) else (fours,)


def machine(chip: str, shape: tuple[int, ...], *, hosts: int) -> str:
    """Google Kubernetes Engine's machine of a slice that Cloud TPU itself doesn't start, or ""."""
    unusual = hosts != hosts_of(chip, shape)[0]
    return _MACHINES[chip] if unusual or chip in _WITHOUT_CLOUD_TPU else ""
