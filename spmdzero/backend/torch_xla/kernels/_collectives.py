"""Collectives of `torch.distributed` for tensors on the devices, which gloo refuses."""

import functools

import torch

from spmdzero.backend.hosts._device_tensors import COLLECTIVES, over_hosts

# It holds the kernels as long as the process lives.
_library: list[torch.library.Library] = []


@functools.cache
def carry_collectives_over_hosts() -> None:
    """Makes collectives outside of a forward work on the hosts' copies of such tensors."""
    library = torch.library.Library("c10d", "IMPL")
    _library.append(library)
    for func in COLLECTIVES:
        name = func._schema.name.partition("::")[2]
        library.impl(name, functools.partial(over_hosts, func), "XLA")
