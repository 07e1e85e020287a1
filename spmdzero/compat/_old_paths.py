"""Makes DeepSpeed's module paths importable, such as `spmdzero.ops.adam`.

One finder knows all paths: a path is a module of spmdzero, or is made of names of several modules,
or is refused with a reason. `refusals.attribute` answers for a name that a module doesn't have.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from spmdzero.compat.refusals import REFUSALS, attribute, why_refused
from spmdzero.errors import RefusedImportError

# Path below `spmdzero` -> the real module; modules below the path are those below the real module.
_SAME = {
    "accelerator": "spmdzero.compat.accelerator",
    "checkpointing": "spmdzero.compat.checkpointing",
    "comm": "spmdzero.compat.comm",
    "git_version_info": "spmdzero.compat.git_version_info",
    "launcher.runner": "spmdzero.integrations.launcher.runner",
    "refusals": "spmdzero.compat.refusals",
    "runtime.activation_checkpointing.checkpointing": "spmdzero.compat.checkpointing",
    "runtime.config": "spmdzero.compat.runtime_config",
    "runtime.lr_schedules": "spmdzero.compat.lr_schedules",
    "runtime.sequence_parallel.parallel_state_sp": "spmdzero.compat.parallel_state_sp",
    "runtime.sequence_parallel.ulysses_sp": "spmdzero.compat.ulysses_sp",
    "runtime.utils": "spmdzero.compat.runtime_utils",
    "sequence.layer": "spmdzero.compat.sequence_layer",
    "store": "spmdzero.formats",
    "utils.groups": "spmdzero.compat.groups",
    "utils.logging": "spmdzero.compat.logging",
    "utils.tensor_fragment": "spmdzero.compat.tensor_fragment",
    "utils.z3_leaf_module": "spmdzero.compat.z3_leaf_module",
    "utils.zero_to_fp32": "spmdzero.compat.zero_to_fp32",
    "xla": "spmdzero.backend",
}
# Paths among them that DeepSpeed doesn't have.
_NOT_THEIRS = ("refusals", "store", "xla")
# Folders of spmdzero that have DeepSpeed's names.
_ITS_OWN = ("monitor", "profiling")
_CONTEXTS = "GatheredParameters register_external_parameter"
_ESTIMATES = (
    "estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live"
)
_PIPELINE = "LayerSpec PipelineModule TiedLayerSpec"
# Path -> module below `spmdzero` -> its names that the path has; "ours=theirs" renames.
_MADE: dict[str, dict[str, str]] = {
    "accelerator.real_accelerator": {"compat.accelerator": "get_accelerator"},
    "checkpoint": {},
    "checkpoint.utils": {"compat.helpers": "clone_tensors_for_torch_save"},
    "compression": {},
    "compression.helper": {"compat.helpers": "recursive_getattr recursive_setattr"},
    "launcher": {},
    "moe": {},
    "moe.experts": {"compat.moe": "Experts"},
    "moe.layer": {"compat.moe": "MoE"},
    "moe.sharded_moe": {"compat.moe": "MOELayer TopKGate"},
    "moe.utils": {
        "compat.moe": """has_moe_layers is_moe_param is_moe_param_group
            split_params_into_different_moe_groups_for_optimizer"""
    },
    "ops": {},
    "ops.adagrad": {},
    "ops.adam": {"optim": "DeepSpeedCPUAdam FusedAdam"},
    "ops.adam.cpu_adam": {"optim": "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {"optim": "FusedAdam"},
    "ops.lamb": {"optim": "FusedLamb"},
    "ops.lamb.fused_lamb": {"optim": "FusedLamb"},
    "ops.lion": {"optim": "DeepSpeedCPULion FusedLion"},
    "ops.lion.cpu_lion": {"optim": "DeepSpeedCPULion"},
    "ops.lion.fused_lion": {"optim": "FusedLion"},
    "pipe": {"compat.pipe": _PIPELINE},
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.base_optimizer": {
        "compat.optimizer": "DeepSpeedOptimizer DeepSpeedOptimizer=ZeROOptimizer"
    },
    "runtime.dataloader": {
        "compat.accelerator": "get_accelerator",
        "compat.helpers": "RepeatingLoader",
    },
    "runtime.engine": {"compat.engine": "DeepSpeedEngine"},
    "runtime.pipe": {"compat.pipe": _PIPELINE},
    "runtime.pipe.engine": {"compat.pipe": "PipelineEngine"},
    "runtime.pipe.module": {"compat.pipe": f"{_PIPELINE} PipelineError"},
    "runtime.pipe.topology": {
        "compat.pipe": "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology"
    },
    "runtime.sequence_parallel": {},
    "runtime.zero": {"compat.zero_contexts": _CONTEXTS, "compat.zero_init": "Init"},
    "runtime.zero.partition_parameters": {
        "compat.accelerator": "get_accelerator",
        "compat.zero_contexts": (
            f"{_CONTEXTS} ZeroParamType is_zero_param unregister_external_parameter"
        ),
        "compat.zero_init": "Init",
        "engine": "ZeroParamStatus",
    },
    "runtime.zero.utils": {"compat.zero_contexts": "is_zero_param"},
    "runtime.zero.stage_1_and_2": {
        "compat.zero_estimate": _ESTIMATES,
        "compat.optimizer": "DeepSpeedOptimizer=DeepSpeedZeroOptimizer",
        "plan": "estimate_zero2_model_states_mem_needs",
    },
    "sequence": {},
    "utils": {
        "compat.accelerator": "get_accelerator",
        "compat.groups": """
            bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_world_size
            get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size
            get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size
            get_tensor_model_parallel_group get_tensor_model_parallel_rank
            get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size""",
        "compat.helpers": """
            OnDevice RepeatingLoader instrument_w_nvtx recursive_getattr recursive_setattr""",
        "compat.logging": "log_dist log_dist_once logger set_log_level_from_string",
        "compat.tensor_fragment": """
            safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
            safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
            safe_update_full_grad_vectorized""",
        "compat.z3_leaf_module": """
            get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name
            set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter""",
    },
    "utils.module_utils": {"compat.helpers": "recursive_getattr recursive_setattr"},
    "utils.nvtx": {"compat.helpers": "instrument_w_nvtx"},
    "zero": {
        "compat.zero_contexts": f"{_CONTEXTS} ZeroParamType unwrap_model_for_generation",
        "compat.zero_init": "DeepSpeedTensorOverride Init",
        "engine": "ZeroParamStatus",
        "compat.zero_estimate": _ESTIMATES,
        "plan": "estimate_zero2_model_states_mem_needs",
    },
}


FIRST_LEVEL = tuple(p for p in {**_SAME, **_MADE} if "." not in p and p not in _NOT_THEIRS)
"""Modules that `import deepspeed` imports too: scripts write ``deepspeed.zero.Init``."""


class _Same(Loader):
    """Loads the real module under a second path, so that both paths share its state."""

    def __init__(self, path: str, real: str) -> None:
        self._path, self._real = path, real
        self._own: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Imports the real module of the path."""
        module = importlib.import_module(self._real)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its own spec back, which importlib has replaced."""
        module.__spec__ = self._own
        vars(module).setdefault("__getattr__", functools.partial(attribute, self._path))

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the real module, which `python -m` runs."""
        return code_of(importlib.util.find_spec(self._real))


class _Made(Loader):
    """Makes a module of names from other modules."""

    def __init__(self, path: str) -> None:
        self._path = path

    def create_module(self, spec: ModuleSpec) -> None:
        """Lets importlib create the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module."""
        names = []
        for source, wanted in _MADE[self._path].items():
            held = importlib.import_module(f"spmdzero.{source}")
            for word in wanted.split():
                ours, _, theirs = word.partition("=")
                names.append(theirs or ours)
                setattr(module, names[-1], getattr(held, ours))
        module.__doc__ = f"`deepspeed.{self._path}`."
        vars(module).update(__all__=names, __getattr__=functools.partial(attribute, self._path))


class _OldPaths(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, below = fullname.partition(".")
        if package != "spmdzero":
            return None
        if below in _MADE:
            return ModuleSpec(fullname, _Made(below), is_package=True)
        outer = _prefix_in(_SAME, below)
        if outer is not None:
            real = _SAME[outer] + below.removeprefix(outer)
            if importlib.util.find_spec(real) is not None:
                return ModuleSpec(fullname, _Same(below, real))
        refused = _prefix_in(REFUSALS, below)
        if refused is None:
            return None
        error = RefusedImportError(f"deepspeed.{below}: {why_refused(refused)}")
        error.name = fullname
        raise error


def _prefix_in(table: Collection[str], path: str) -> str | None:
    """The path, or the package that holds it, if the table has it."""
    parts = path.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if prefix in table), None)


def code_of(found: ModuleSpec | None) -> CodeType | None:
    """The code of a module's file, which `python -m` asks a loader for."""
    code = getattr(found.loader, "get_code", None) if found is not None else None
    return code(found.name) if found is not None and code is not None else None


def is_deepspeeds(path: str) -> bool:
    """Whether DeepSpeed has a module `deepspeed.<path>` that spmdzero has too, or refuses."""
    known = path in _MADE or _prefix_in(_SAME, path) or _prefix_in(_ITS_OWN, path)
    return bool(known or _prefix_in(REFUSALS, path))


def keep_old_paths() -> None:
    """Makes the paths importable."""
    sys.meta_path.insert(0, _OldPaths())
