"""DeepSpeed's estimate of the memory that ZeRO-2 needs."""


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of CPU memory per node and of device memory per device, for 16-bit training.

    DeepSpeed's formulas (runtime/zero/stage_1_and_2.py): 2 bytes per parameter everywhere, and 18
    (gradients 2 + 4, master 4, moments 8) divided by the devices. `ShardingPlan.memory` gives the
    exact bytes of a config of spmdzero.
    """
    total_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        gpu_mem = 2 * total_params
        cpu_mem = total_params * max(4 * total_gpus, 16) * additional_buffer_factor
    else:
        gpu_mem = 2 * total_params + int(18 * total_params / total_gpus)
        cpu_mem = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(cpu_mem), int(gpu_mem)
