"""The sizes of mesh axes that a script says by DeepSpeed's `mpu` or `mesh_param`."""

from typing import Any

from spmdzero.backend.hosts._row_sharers import RowSharers, share_rows
from spmdzero.config import read, with_value
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import MeshSpec


def with_mpus_size(config: Any, mpu: Any) -> Any:
    """The config, with the ``sequence_parallel_size`` of `mpu`, if there is one.

    Args:
        config: as `read` takes it.
        mpu: what `UlyssesSPAttentionHF.register_with_transformers` has returned, or the module
            `deepspeed.runtime.sequence_parallel.parallel_state_sp`.

    Raises:
        SpmdZeroConfigError: the config has a different one.
        SpmdZeroUsageError: it is another `mpu`.
    """
    if mpu is None:
        return config
    group = getattr(mpu, "get_sequence_parallel_group", lambda: None)()
    if not isinstance(group, RowSharers):
        raise SpmdZeroUsageError(
            f"initialize(mpu={getattr(mpu, '__name__', type(mpu).__name__)}): it has groups of "
            "processes, and one process drives all devices. Give it what "
            "UlyssesSPAttentionHF.register_with_transformers returns, or leave it out: "
            '"sequence_parallel_size" lets devices share rows, "tensor_parallel": '
            '{"autotp_size": 2} weights'
        )
    size = group.size()
    otherwise = f"the mpu says {size}"
    return with_value(read(config), "sequence_parallel_size", size, otherwise=otherwise)


def with_mesh_param(config: Any, mesh_param: Any) -> Any:
    """The config, with the sizes of the mesh that DeepSpeed would make of `mesh_param`.

    Args:
        config: as `read` takes it.
        mesh_param: number of replicas, and of devices that share the rows of each; None for none.

    Raises:
        SpmdZeroConfigError: the config has different ones.
        SpmdZeroUsageError: it isn't two numbers.

    Source: DeepSpeed, ``deepspeed.initialize``.
    """
    if not mesh_param:
        return config
    sizes = tuple(mesh_param) if isinstance(mesh_param, list | tuple) else ()
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise SpmdZeroUsageError(
            f"initialize(mesh_param={mesh_param!r}): it is (data_parallel, sequence_parallel), the "
            "number of replicas and of devices that share the rows of each, such as (2, 4) for 8 "
            'devices. "tensor_parallel": {"autotp_size": 2} splits weights'
        )
    given = read(config)
    for key, size in zip(("data_parallel_size", "sequence_parallel_size"), sizes, strict=True):
        given = with_value(given, key, size, otherwise=f"mesh_param={mesh_param} says {size}")
    return given


def share_asked(mesh_param: Any, mesh: MeshSpec) -> None:
    """Makes the group of the devices that share rows, if `mesh_param` has asked for it.

    Scripts ask deepspeed.utils.groups for it afterwards.
    """
    if mesh_param and mesh.sequence > 1:
        share_rows(mesh.sequence)
