"""The config that spmdzero honours, under DeepSpeed 0.19.8's names and defaults."""

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from spmdzero.config._errors import RefusedValueError
from spmdzero.config._params import check_schedule_name, optimizer_name
from spmdzero.config._types import Count, Dtype, Natural, Rate, Section
from spmdzero.config._zero import ZeroConfig

OutputRule = Literal["batch", "mean", "sum", "agree", "stack"]


def _none_is_empty(value: object) -> object:
    return {} if value is None else value


def _never_is_none(value: object) -> object:
    # accelerate writes infinity for "never print".
    return None if isinstance(value, float) and value == math.inf else value


_Params = Annotated[dict[str, Any], BeforeValidator(_none_is_empty)]


class OptimizerConfig(Section):
    """The optimizer that the engine builds.

    Attributes:
        type: "Adam", "AdamW" or "SGD"; "Adam" means AdamW unless ``adam_w_mode`` is false.
        params: its parameters as the user wrote them, checked by `load_config`.
    """

    type: Annotated[str, AfterValidator(optimizer_name)]
    params: _Params = Field(default_factory=dict)


class SchedulerConfig(Section):
    """The learning-rate schedule that the engine builds.

    Attributes:
        type: one of DeepSpeed's schedules or a class name of torch.optim.lr_scheduler.
        params: its parameters as the user wrote them, checked by `load_config`.
    """

    type: Annotated[str, AfterValidator(check_schedule_name)]
    params: _Params = Field(default_factory=dict)


class Bf16Config(Section):
    """bf16 parameters and gradients with fp32 master weights.

    Attributes:
        enabled: whether parameters are bf16.
        check_grad_overflow: whether a step with a non-finite gradient is skipped.
        immediate_grad_update: no meaning here, see `NO_MEANING`.
    """

    enabled: bool = False
    check_grad_overflow: bool = True
    immediate_grad_update: bool = False


class DataTypesConfig(Section):
    """Dtypes of the tensors that live between micro-batches.

    Attributes:
        grad_accum_dtype: dtype of the gradient accumulator; None means the parameter's.
    """

    grad_accum_dtype: Dtype | None = None


class SpmdConfig(Section):
    """What DeepSpeed has no key for.

    Attributes:
        mesh: devices on each mesh axis, "data" before "fsdp"; -1 takes the devices that are left.
        forward: "region" runs the module on each replica's rows, "global" on the global batch.
        reduction: who reduces a gradient: the compiler ("annotated"), a call in the replica
            region ("explicit"), or whichever keeps a reduce-scatter ("auto").
        batch_dim: the tensor dim of the batch, for all inputs or by an input's name.
        outputs: how an output leaves the region, by its dotted path such as "attentions.0".
        min_shard_elements: tensors with fewer elements are replicated.
        check_finite: whether a non-finite loss or gradient raises before the update.
    """

    mesh: dict[str, int] = Field(default_factory=lambda: {"fsdp": -1})
    forward: Literal["region", "global"] = "region"
    reduction: Literal["annotated", "explicit", "auto"] = "auto"
    batch_dim: int | dict[str, int] = 0
    outputs: dict[str, OutputRule] = Field(default_factory=dict)
    min_shard_elements: Natural = 2048
    check_finite: bool = False

    @field_validator("mesh")
    @classmethod
    def _axes(cls, mesh: dict[str, int]) -> dict[str, int]:
        example = 'Write {"fsdp": -1}, or {"data": 2, "fsdp": -1} for two replicas of the shards.'
        if not {"fsdp"} <= mesh.keys() <= {"data", "fsdp"}:
            raise RefusedValueError("the mesh axes are 'fsdp' and, if wanted, 'data'", fix=example)
        if list(mesh.values()).count(-1) > 1:
            raise RefusedValueError("only one axis can take the devices that are left", fix=example)
        if any(size < 1 and size != -1 for size in mesh.values()):
            raise RefusedValueError(
                "an axis has 1 device or more, or -1 for what is left", fix=example
            )
        return {axis: mesh[axis] for axis in ("data", "fsdp") if axis in mesh}

    # A union would put the name of its branch into the error's key.
    @field_validator("batch_dim", mode="plain")
    @classmethod
    def _dims(cls, batch_dim: object) -> object:
        dims = list(batch_dim.values()) if isinstance(batch_dim, dict) else [batch_dim]
        if any(isinstance(dim, bool) or not isinstance(dim, int) or dim < 0 for dim in dims):
            raise RefusedValueError(
                "this is not a tensor dim from 0, nor an object of them by input name",
                fix='Write 0, or for example {"input_ids": 0, "hidden": 1}.',
            )
        return batch_dim

    @model_validator(mode="after")
    def _reduction_has_a_place(self) -> "SpmdConfig":
        if self.forward == "global" and self.reduction == "explicit":
            raise RefusedValueError(
                "explicit reduction happens in the replica region, which a global forward lacks",
                fix='Write "auto", or "forward": "region".',
                at=("reduction",),
            )
        if self.forward == "global" and self.outputs:
            raise RefusedValueError(
                "outputs leave no replica region when the forward is global",
                fix='Leave it out, or write "forward": "region".',
                at=("outputs",),
            )
        return self


class SpmdZeroConfig(Section):
    """A checked config; build it with `load_config`.

    Attributes:
        train_batch_size: samples that one optimizer step consumes on all devices.
        train_micro_batch_size_per_gpu: samples that one device sees in one forward.
        gradient_accumulation_steps: micro-batches between two optimizer steps.
        steps_per_print: optimizer steps between two progress lines; None prints none.
        gradient_clipping: largest global L2 norm of the gradient; 0 turns clipping off.
        communication_data_type: dtype of the collectives; None means the gradient's.
        dataloader_drop_last: whether the loader drops the last incomplete batch.
        disable_allgather, vocabulary_size, zero_allow_untested_optimizer,
            zero_force_ds_cpu_optimizer: see `NO_MEANING`.
    """

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    steps_per_print: Annotated[Count | None, BeforeValidator(_never_is_none)] = None
    gradient_clipping: Rate = 1.0
    communication_data_type: Dtype | None = None
    zero_allow_untested_optimizer: bool = False
    dataloader_drop_last: bool = False
    disable_allgather: bool = False
    vocabulary_size: Natural | None = None
    zero_force_ds_cpu_optimizer: bool = True
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    zero_optimization: ZeroConfig = ZeroConfig()
    bf16: Annotated[Bf16Config, BeforeValidator(_none_is_empty)] = Bf16Config()
    data_types: DataTypesConfig = DataTypesConfig()
    spmd: SpmdConfig = SpmdConfig()

    _source: dict[str, Any] = PrivateAttr(default_factory=dict)
    _no_meaning: tuple[str, ...] = PrivateAttr(default=())

    @property
    def source(self) -> dict[str, Any]:
        """The user's config as it was written, a copy that this object owns."""
        return self._source

    @property
    def no_meaning(self) -> tuple[str, ...]:
        """Dotted names of the keys in `source` that `NO_MEANING` lists."""
        return self._no_meaning


SECTIONS: dict[str, type[Section]] = {
    "": SpmdZeroConfig,
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerConfig,
    "zero_optimization": ZeroConfig,
    "bf16": Bf16Config,
    "data_types": DataTypesConfig,
    "spmd": SpmdConfig,
}
"""The model of each section, by the section's path."""
