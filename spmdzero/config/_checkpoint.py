"""The section ``checkpoint``."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from spmdzero.config._errors import RefusedValueError
from spmdzero.config._types import Count, DeepSpeedSection, upper


class ParallelWriteConfig(DeepSpeedSection):
    """Says which of DeepSpeed's ranks write a checkpoint."""

    pipeline_stage: bool = False


class CheckpointConfig(DeepSpeedSection):
    """How checkpoints are written. The first three keys are spmdzero's, the others DeepSpeed's.

    Attributes:
        asynchronous: ``async`` in JSON: whether `save_checkpoint` returns as soon as the state is
            in the host's memory, and files are written while training goes on.
        keep_last: number of newest checkpoints to keep; older ones that `latest` once named are
            deleted when a new one is complete. None keeps all.
        keep_every: checkpoints whose global step is a multiple of this number are kept too.
        load_universal: whether `load_checkpoint` without a tag takes the tag in `latest_universal`
            instead of the one in `latest`. The format itself is recognised.
        use_node_local_storage: whether each host has a folder of its own; refused on several
            hosts, which write into one folder.
        tag_validation: what to do if the hosts don't name the same tag.
        checkpoint_serialization, parallel_write, writer: see `NO_MEANING`.
    """

    asynchronous: bool = Field(default=False, alias="async")
    keep_last: Count | None = None
    keep_every: Count | None = None
    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], BeforeValidator(upper)] = "WARN"
    load_universal: bool = False
    use_node_local_storage: bool = False
    checkpoint_serialization: bool = True
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    writer: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _every_needs_last(self) -> "CheckpointConfig":
        if self.keep_every is not None and self.keep_last is None:
            raise RefusedValueError(
                "without keep_last nothing is deleted, so there is nothing to keep",
                fix='Add "keep_last": 2, for example.',
                at=("keep_every",),
            )
        return self
