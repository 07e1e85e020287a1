"""Collectives of `torch.distributed`, of tensors that hosts hand over outside of a forward."""

import functools

from spmdzero.backend.hosts._device_tensors import COLLECTIVES, over_hosts
from spmdzero.backend.jax.lazy._dispatch import special

for _func in COLLECTIVES:
    special(_func)(functools.partial(over_hosts, _func))
