"""The sections about reports of a run: monitors, the profiler and the communication log."""

from pydantic import Field

from spmdzero.config._types import Count, DeepSpeedSection, Natural, Rate

_JOB = "DeepSpeedJobName"


class TensorBoardConfig(DeepSpeedSection):
    """Scalars as TensorBoard event files.

    Attributes:
        enabled: whether scalars are written.
        output_path: the folder of the job's folder; empty means the working folder's.
        job_name: name of the job's folder.
    """

    enabled: bool = False
    output_path: str = ""
    job_name: str = _JOB


class WandbConfig(DeepSpeedSection):
    """Scalars in Weights & Biases.

    Attributes:
        enabled: whether scalars are sent.
        group: group of the run.
        team: entity of the run.
        project: project of the run.
    """

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CsvConfig(DeepSpeedSection):
    """Scalars as CSV files, one file for each scalar.

    Attributes:
        enabled: whether scalars are written.
        output_path: the folder of the job's folder; empty means the working folder's.
        job_name: name of the job's folder.
    """

    enabled: bool = False
    output_path: str = ""
    job_name: str = _JOB


class FlopsProfilerConfig(DeepSpeedSection):
    """The profile of one step's floating-point operations.

    Attributes:
        enabled: whether a step is profiled.
        recompute_fwd_factor: has no effect, see `NO_MEANING`.
        profile_step: the step to profile, from 1.
        module_depth: depth of the modules to list; -1 means the deepest.
        top_modules: number of modules to list at each depth.
        detailed: whether each module is listed.
        output_file: path of the report; None means the log.
    """

    enabled: bool = False
    recompute_fwd_factor: Rate = 0.0
    profile_step: Natural = 1
    module_depth: int = -1
    top_modules: Count = 1
    detailed: bool = True
    output_file: str | None = None


class CommsLoggerConfig(DeepSpeedSection):
    """The log of collectives.

    Attributes:
        enabled: whether collectives are logged.
        prof_all: whether all operations are logged, or only those of ``prof_ops``.
        prof_ops: names of operations, such as "all_reduce".
        verbose: whether each call is logged besides the summary.
        debug: has no effect, see `NO_MEANING`.
    """

    enabled: bool = False
    prof_all: bool = True
    prof_ops: list[str] = Field(default_factory=list)
    verbose: bool = False
    debug: bool = False
