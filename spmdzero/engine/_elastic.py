"""The numbers of hosts on which a config's batch sizes hold, for `spmdzero launch --elastic`."""

from spmdzero._to_launcher import is_elastic, is_first_start, tell
from spmdzero.backend import runtime
from spmdzero.config import BatchSizes, SpmdZeroConfig, resolve_batch_sizes
from spmdzero.engine._plan_of import mesh_of
from spmdzero.errors import BatchSizesError, SpmdZeroConfigError


def tell_sizes(settings: SpmdZeroConfig, batch: BatchSizes) -> None:
    """Tells an elastic launcher the numbers of hosts on which the config's batch and mesh hold.

    Args:
        settings: the config.
        batch: the batch sizes on the present hosts.

    Raises:
        BatchSizesError: fewer hosts would have a different batch, or can't have this one.
    """
    if not is_elastic():
        return
    if settings.train_batch_size is None:
        raise BatchSizesError(
            key="train_batch_size",
            value=None,
            reason="spmdzero launch --elastic may go on with fewer hosts, and so with another "
            "batch: it follows from their devices",
            fix=f"Write train_batch_size {batch.train}.",
        )
    hosts, devices = runtime.process_count(), runtime.local_device_count()
    sizes = [count for count in range(1, hosts + 1) if _holds(settings, count * devices)]
    if hosts > 1 and sizes == [hosts] and is_first_start():
        raise BatchSizesError(
            key="train_batch_size",
            value=settings.train_batch_size,
            reason=f"spmdzero launch --elastic may go on with fewer than {hosts} hosts of "
            f"{devices} devices, and this is micro ({batch.micro}) x accumulation "
            f"({batch.accumulation}) x devices, with the mesh, on no fewer of them",
            fix="Leave gradient_accumulation_steps out, which follows then, and the sizes of the "
            "mesh, or leave --elastic out.",
        )
    tell("sizes", sizes)


def _holds(settings: SpmdZeroConfig, devices: int) -> bool:
    try:
        spec = mesh_of(settings, devices)
        return resolve_batch_sizes(settings, dp_world_size=spec.replicas).micro > 0
    except SpmdZeroConfigError:
        return False
