"""A finding about a number of processes that a model keeps, and asks in its forward."""

from torch import nn

from spmdzero.audit._report import Finding

_NAMES = ("world_size", "process_count", "num_processes", "n_gpu", "num_gpus", "num_replicas")


def world_size_of_hosts(module: nn.Module, *, hosts: int, devices: int) -> list[Finding]:
    """Findings about attributes of submodules that hold the number of hosts, and not of devices.

    Args:
        module: the trained module.
        hosts, devices: their numbers.
    """
    return [
        Finding(
            name="world-size-of-hosts",
            severity="warning",
            subject=f"the attribute {f'{prefix}.{name}'.lstrip('.')!r} of the model",
            cause=f"it is {hosts}, the number of hosts, as torch.distributed answers outside of a "
            f"forward, and {devices} devices train: a gather behind `if world_size > 1` is left "
            "out, and each device's loss sees its own rows alone",
            fix="ask torch.distributed.get_world_size() in the forward, where it is the number of "
            "devices, and get_rank() too",
            evidence=f"{name} = {hosts}",
        )
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if name.lstrip("_") in _NAMES and type(value) is int and value == hosts != devices
    ]
