"""The client of the devices: whether it has started, and the seed of its generator."""

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
