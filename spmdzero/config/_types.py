"""The base of every section, and the number types that a config may hold."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from spmdzero.config._errors import RefusedValueError


class Section(BaseModel):
    """A frozen section that takes no unknown key and coerces nothing."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


def _integral(value: object) -> object:
    # DeepSpeed's examples write bucket sizes and step counts as 5e8.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _no_half(value: object) -> object:
    name = value.lower() if isinstance(value, str) else value
    if name == "fp16":
        raise RefusedValueError(
            "fp16 is not in this release", fix="Write 'bf16', which TPUs compute in."
        )
    return name


Natural = Annotated[int, BeforeValidator(_integral), Field(ge=0)]
"""A whole number from 0, which may be written as 5e8."""

Count = Annotated[int, BeforeValidator(_integral), Field(gt=0)]
"""A whole number from 1, which may be written as 5e8."""

Rate = Annotated[float, Field(ge=0)]
"""A finite number from 0."""

Dtype = Annotated[Literal["fp32", "bf16"], BeforeValidator(_no_half)]
"""A floating dtype by DeepSpeed's name."""
