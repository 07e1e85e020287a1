"""The size of the mesh axis ``sequence`` that a script says by DeepSpeed's `mpu`."""

from typing import Any

from spmdzero.compat.comm._row_sharers import RowSharers
from spmdzero.config import read, with_value
from spmdzero.errors import SpmdZeroUsageError


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
