"""DeepSpeed's estimate of what ZeRO-2 needs, by its formulas and in its words."""

from torch import nn


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of CPU memory per node and of device memory per device, for 16-bit training.

    DeepSpeed's formulas (runtime/zero/stage_1_and_2.py): 2 bytes per parameter everywhere, and
    18 (gradients 2 + 4, master 4, moments 8) divided by the devices. For what a config of
    spmdzero needs, `engine.plan.memory()` is exact.
    """
    total_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        gpu_mem = 2 * total_params
        cpu_mem = total_params * max(4 * total_gpus, 16) * additional_buffer_factor
    else:
        gpu_mem = 2 * total_params + int(18 * total_params / total_gpus)
        cpu_mem = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(cpu_mem), int(gpu_mem)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimate with and without offload for a module; shared parameters count once."""
    estimate_zero2_model_states_mem_needs_all_cold(
        sum(parameter.numel() for parameter in model.parameters()),
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimate with and without offload for a number of parameters."""
    nodes = "nodes" if num_nodes > 1 else "node"
    gpus = "GPUs" if num_gpus_per_node > 1 else "GPU"
    print(
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {num_nodes} {nodes}, {num_gpus_per_node} {gpus} per node.\n"
        f"SW: Model with {int(total_params / 1e6)}M total params."
    )
    print("  per CPU  |  per GPU |   Options")
    for cpu_offload in (True, False):
        cpu_mem, gpu_mem = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor
        )
        # As DeepSpeed's enum prints itself since Python 3.11.
        option = f"offload_optimizer={'OffloadDeviceEnum.cpu' if cpu_offload else 'none'}"
        print(f" {cpu_mem / 2**30:7.2f}GB | {gpu_mem / 2**30:6.2f}GB | {option}")
