"""The sections about reports of a run: monitors, the profiler and the communication log."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from spmdzero.config._types import Count, DeepSpeedSection, Natural, Rate, whole

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


class CometConfig(DeepSpeedSection):
    """Scalars in Comet, by its package `comet_ml`.

    Attributes:
        enabled: whether scalars are sent.
        samples_log_interval: number of samples after which a scalar is sent again.
        project: project of the experiment; null takes that of Comet's own settings.
        workspace: workspace of the experiment; null takes that of Comet's own settings.
        api_key: Comet's key; null takes Comet's own settings.
        experiment_name: name of the experiment.
        experiment_key: key of the experiment.
        online: whether scalars go to Comet's server, or stay in a file; null means true.
        mode: "get", "create" or "get_or_create".
    """

    enabled: bool = False
    samples_log_interval: Natural = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class FlopsProfilerConfig(DeepSpeedSection):
    """The profile of one step's floating-point operations.

    Attributes:
        enabled: whether a step is profiled.
        recompute_fwd_factor: has no effect, see `NO_MEANING`.
        profile_step: the step to profile, from 1; one below 0 never comes.
        module_depth: depth of the modules to list; -1 means the deepest.
        top_modules: number of modules to list at each depth.
        detailed: whether each module is listed.
        output_file: path of the report; None means the log.
    """

    enabled: bool = False
    recompute_fwd_factor: Rate = 0.0
    profile_step: Annotated[int, BeforeValidator(whole)] = 1
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
