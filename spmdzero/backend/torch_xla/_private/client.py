"""The client of the devices: whether it has started, and the seed of its generator."""

import torch
from torch_xla import _XLAC as _C


def spmd_is_locked() -> bool:
    """Whether a device was already used, so that SPMD can no longer be switched on or off."""
    return _C._xla_get_spmd_config_is_locked()


def runtime_has_started() -> bool:
    """Whether the client of the devices exists, which reads its flags only once."""
    return _C._xla_runtime_is_initialized()


def start_runtime() -> None:
    """Creates the client of the devices, which reads its flags; a device's first use does too."""
    _C._init_computation_client()


def seed_id() -> int:
    """The id under which a program reads the seed of the device's own generator."""
    return _C._get_seed_info_id()


def seed_tensor(device: torch.device) -> torch.Tensor:
    """The seed of the device's own generator, on the device."""
    return _C._get_base_seed_as_tensor(str(device))


def advance_seed(device: torch.device) -> None:
    """Moves the device's own generator to its next state, as `sync` does."""
    # torch's LazyGraphExecutor computes this in 64 bits (lazy_graph_executor.cpp, `MarkStep`).
    seed = (1012031 + _C._xla_get_rng_seed() * 7012063) % 2**64
    _C._xla_set_rng_seed(seed, str(device))
