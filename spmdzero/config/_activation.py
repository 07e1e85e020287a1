"""The section ``activation_checkpointing``."""

from pydantic import field_validator

from spmdzero.config._errors import RefusedValueError
from spmdzero.config._types import Natural, Section


class ActivationCheckpointingConfig(Section):
    """Where DeepSpeed keeps checkpointed activations; `NO_MEANING` tells why little is left.

    The model decides what is recomputed, with ``spmdzero.checkpointing.checkpoint``.

    Attributes:
        cpu_checkpointing: only false.
    """

    partition_activations: bool = False
    number_checkpoints: Natural | None = None
    contiguous_memory_optimization: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
    cpu_checkpointing: bool = False

    @field_validator("cpu_checkpointing")
    @classmethod
    def _on_the_device(cls, cpu_checkpointing: bool) -> bool:
        if cpu_checkpointing:
            raise RefusedValueError(
                "activations stay in the devices' memory, spmdzero doesn't offload them",
                fix="Write false, and checkpoint more of the model where memory is short.",
            )
        return cpu_checkpointing
