"""Who takes part, by DeepSpeedEngine's names.

One process drives all devices of its host. What DeepSpeed counts in ranks is therefore two things
here: processes (`world_size`, `global_rank`) and devices (`dp_world_size`).
"""

from spmdzero.backend.torch_xla import runtime
from spmdzero.plan import ShardingPlan


class WorldSettings:
    """World sizes and ranks of the engine."""

    plan: ShardingPlan
    has_moe_layers = False
    pipeline_parallelism = False
    mp_world_size = 1
    local_rank = 0

    @property
    def world_size(self) -> int:
        """Processes, one per host: what `comm.get_world_size()` counts."""
        return runtime.process_count()

    @property
    def global_rank(self) -> int:
        """This process's index."""
        return runtime.process_index()

    @property
    def dp_world_size(self) -> int:
        """Devices that each train on their own rows: the factor of the batch triangle."""
        return self.plan.mesh.size

    def get_data_parallel_rank(self) -> int:
        """This process's index; its devices hold consecutive data-parallel ranks."""
        return runtime.process_index()

    def get_model_parallel_rank(self) -> int:
        """0: there is no model parallelism."""
        return 0

    def get_tensor_parallel_rank(self) -> int:
        """0: there is no tensor parallelism."""
        return 0

    def autotp_size(self) -> int:
        """0: there is no automatic tensor parallelism."""
        return 0

    def get_sequence_parallel_group(self) -> None:
        """None: there is no sequence parallelism."""
