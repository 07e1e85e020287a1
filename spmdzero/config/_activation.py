"""The section ``activation_checkpointing``."""

from spmdzero.config._types import DeepSpeedSection, Natural


class ActivationCheckpointingConfig(DeepSpeedSection):
    """Where DeepSpeed keeps checkpointed activations; here the compiler decides.

    What is recomputed is the model's choice. `NO_MEANING` tells why no key has an effect, and
    ``cpu_checkpointing`` is refused unless it is false.
    """

    partition_activations: bool = False
    number_checkpoints: Natural | None = None
    contiguous_memory_optimization: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
    cpu_checkpointing: bool = False
