"""Records what real DeepSpeed's config getters return into tests/data/engine_getters.json.

Needs deepspeed==0.19.8: `DS_ACCELERATOR=cpu python tests/surface/record_getters.py`. One process
with one rank; each configuration makes an engine, whose getters are called without arguments.
"""

import inspect
import json
import os
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "engine_getters.json"

CONFIGS: dict[str, dict[str, Any]] = {
    "defaults": {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    },
    "everything": {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "steps_per_print": 7,
        "gradient_clipping": 0.5,
        "prescale_gradients": True,
        "gradient_predivide_factor": 2.0,
        "communication_data_type": "fp32",
        "dataloader_drop_last": True,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "bf16": {"enabled": True},
        "fp16": {
            "enabled": False,
            "initial_scale_power": 12,
            "loss_scale_window": 500,
            "hysteresis": 3,
            "consecutive_hysteresis": True,
            "min_loss_scale": 2,
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "betas": [0.9, 0.95]}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 10, "warmup_max_lr": 2e-3},
        },
        "zero_optimization": {
            "stage": 1,
            "overlap_comm": True,
            "contiguous_gradients": False,
            "reduce_scatter": False,
            "reduce_bucket_size": 1000000,
            "allgather_bucket_size": 2000000,
            "allgather_partitions": False,
            "round_robin_gradients": True,
            "sub_group_size": 3000000,
            "use_multi_rank_bucket_allreduce": False,
        },
        "flops_profiler": {
            "enabled": True,
            "profile_step": 5,
            "module_depth": 2,
            "top_modules": 3,
            "detailed": False,
            "output_file": "flops.txt",
        },
    },
}

# They tell about what spmdzero refuses: autotuning, offload, tensor parallelism, compiler passes.
REFUSED = (
    "autotuning_end_profile_step", "autotuning_metric", "autotuning_metric_path",
    "autotuning_model_info_path", "autotuning_profile_model_info",
    "autotuning_start_profile_step", "checkpoint_serialization_enabled",
    "checkpoint_writer_enabled", "compile_autosp", "compile_autotp", "cpuadam_cores_perc",
    "curriculum_learning_config", "data_efficiency_config", "data_sampling_config",
    "random_ltd_config", "tensor_parallel_config", "uses_parallelization_pass_only",
    "zenflow_config", "zero_partial_offload",
)  # fmt: skip

# Raise an AttributeError or a TypeError in DeepSpeed itself: what they return was removed.
BROKEN = ("aio_config", "compile_zero_optimization_stage", "swap_tensor_config")

# Attributes that DeepSpeed sets on the engine beside its methods.
ATTRIBUTES = ("communication_data_type", "mp_world_size", "has_moe_layers")


def plain(value: Any) -> Any:
    """A value as JSON holds it: a dtype by its name, a tuple as a list."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value if isinstance(value, int | float | str | None) else str(value)


def is_getter(method: Any) -> bool:
    """Whether a method takes nothing and only returns a field of the config."""
    source = inspect.getsource(method)
    return list(inspect.signature(method).parameters) == ["self"] and "self._config." in source


def record(engine: Any) -> dict[str, Any]:
    """Getter name -> value."""
    names = [
        name
        for name, method in inspect.getmembers(type(engine), inspect.isfunction)
        if not name.startswith("_") and name not in REFUSED + BROKEN and is_getter(method)
    ]
    derived = (
        "get_data_types", "get_lr", "get_mom", "get_type", "zero_optimization_partition_gradients",
        "zero_optimization_partition_weights", "is_first_weights_partition_group",
        "zero_nvme_offload_optimizer",
        "is_deepcompile_active", "is_deepcompile_enabled",
        "get_global_grad_norm", "get_wall_clock_timers",
    )  # fmt: skip
    values = {name: plain(getattr(engine, name)()) for name in sorted({*names, *derived})}
    return values | {name: plain(getattr(engine, name)) for name in ATTRIBUTES}


def main() -> None:
    """Records every configuration."""
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29631"
    )
    import deepspeed
    import torch

    recorded = {}
    for name, config in CONFIGS.items():
        engine, *_ = deepspeed.initialize(
            model=torch.nn.Linear(8, 8), config=json.loads(json.dumps(config))
        )
        recorded[name] = record(engine)
    DATA.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
