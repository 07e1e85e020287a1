"""Prints DeepSpeed's estimate of the memory that ZeRO-2 needs, in DeepSpeed's words."""

from torch import nn

from spmdzero.plan import estimate_zero2_model_states_mem_needs


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
        # Since Python 3.11 DeepSpeed's enum is printed like this.
        option = f"offload_optimizer={'OffloadDeviceEnum.cpu' if cpu_offload else 'none'}"
        print(f" {cpu_mem / 2**30:7.2f}GB | {gpu_mem / 2**30:6.2f}GB | {option}")
