"""DeepSpeedEngine's getters of what is logged, profiled and kept, and of what is always off."""

from spmdzero.config import SpmdZeroConfig


class ReportSettings:
    """What the config says about logging and profiling, by DeepSpeed's method names."""

    spmd_config: SpmdZeroConfig

    def steps_per_print(self) -> int | None:
        """Steps between two progress lines, None for none."""
        return self.spmd_config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the times of forward, backward and step are logged."""
        return self.spmd_config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Whether the devices' memory is logged around each phase."""
        return self.spmd_config.memory_breakdown

    def dump_state(self) -> bool:
        """Whether the config and the engine's state are logged by `initialize`."""
        return self.spmd_config.dump_state

    def log_level(self) -> str | None:
        """The level that the config sets for the logger, None for none."""
        return self.spmd_config.log_level

    def flops_profiler_enabled(self) -> bool:
        """Whether one step's floating-point operations are counted."""
        return self.spmd_config.flops_profiler.enabled

    def flops_profiler_profile_step(self) -> int:
        """The step that is profiled: the value of `global_steps` when it begins."""
        return self.spmd_config.flops_profiler.profile_step

    def flops_profiler_module_depth(self) -> int:
        """How deep modules are listed, -1 for all."""
        return self.spmd_config.flops_profiler.module_depth

    def flops_profiler_top_modules(self) -> int:
        """Modules listed at each depth."""
        return self.spmd_config.flops_profiler.top_modules

    def flops_profiler_detailed(self) -> bool:
        """Whether each module is listed."""
        return self.spmd_config.flops_profiler.detailed

    def flops_profiler_output_file(self) -> str | None:
        """Where the profile is written, None for the standard output."""
        return self.spmd_config.flops_profiler.output_file

    def flops_profiler_recompute_fwd_factor(self) -> float:
        """The config's ``recompute_fwd_factor``."""
        return self.spmd_config.flops_profiler.recompute_fwd_factor

    # -- DeepSpeed's values of what the config refuses or this release does not have -----------

    def autotuning_enabled(self) -> bool:
        """False: autotuning is refused."""
        return False

    def curriculum_learning_enabled(self) -> bool:
        """False: curriculum learning is refused."""
        return False

    def data_efficiency_enabled(self) -> bool:
        """False: data efficiency is refused."""
        return False

    def data_sampling_enabled(self) -> bool:
        """False: data efficiency is refused."""
        return False

    def random_ltd_enabled(self) -> bool:
        """False: random layer token drop is refused."""
        return False

    def use_node_local_storage(self) -> bool:
        """False: all hosts write into one folder that all of them see."""
        return False

    def load_universal_checkpoint(self) -> bool:
        """Whether `load_checkpoint` prefers what `latest_universal` names."""
        return self.spmd_config.checkpoint.load_universal

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether a checkpoint's tag that processes disagree on is a warning or an error."""
        return self.spmd_config.checkpoint.tag_validation != "IGNORE"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether it is an error."""
        return self.spmd_config.checkpoint.tag_validation == "FAIL"
