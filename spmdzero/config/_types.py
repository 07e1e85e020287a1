"""The base class of every section, and the number types of a config."""

import inspect
import types
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A frozen section without unknown keys, which reads 0 and 1 as booleans and null as empty."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _flags_and_numbers(cls, value: object, info: ValidationInfo) -> object:
        found = kinds(cls.model_fields[info.field_name or ""].annotation)
        if value is None and all(kind is dict or is_section(kind) for kind in found):
            return {}
        if bool in found:
            return flag(value)
        if isinstance(value, bool) and found & {int, float}:
            # Python's True equals 1, and a coercing section would accept it.
            raise PydanticCustomError("int_type" if int in found else "float_type", "a number")
        return value

    @classmethod
    def json_keys(cls) -> dict[str, str]:
        """Key in JSON -> attribute: ``async`` can't be a name in Python."""
        return {field.alias or name: name for name, field in cls.model_fields.items()}


class DeepSpeedSection(Section):
    """A section that DeepSpeed reads with pydantic, which coerces: "3" is 3 and "false" is false.

    DeepSpeed doesn't coerce the top level, `optimizer.params` and `scheduler.params`
    (runtime/config_utils.py).
    """

    model_config = ConfigDict(strict=False)


def kinds(annotation: Any) -> set[Any]:
    """The types that a field may hold, for example two for `int | None`."""
    if get_origin(annotation) is Annotated:
        return kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return {kind for member in get_args(annotation) for kind in kinds(member)}
    return {get_origin(annotation) or annotation}


def is_section(kind: Any) -> TypeGuard[type[Section]]:
    """Whether a type of `kinds` is a section."""
    return inspect.isclass(kind) and issubclass(kind, Section)


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a field may hold, as it is or as the entry of a list."""
    if is_section(annotation):
        return annotation
    return next(filter(None, map(section_in, get_args(annotation))), None)


def flag(value: object) -> object:
    """The value, as a boolean if it is 0 or 1, as in old files."""
    return bool(value) if type(value) is int and value in (0, 1) else value


def whole(value: object) -> object:
    """The value, as an int if it is a float without a fraction, else as it is."""
    # DeepSpeed's examples write bucket sizes and step counts as 5e8.
    return int(value) if isinstance(value, float) and value.is_integer() else value


_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}


def canonical_dtype(value: object) -> object:
    """DeepSpeed's name of a dtype, whatever the spelling; the value as it is if it names none."""
    return _DTYPES.get(value.lower(), value) if isinstance(value, str) else value


def lower(value: object) -> object:
    """The value, in lower case if it is a string."""
    return value.lower() if isinstance(value, str) else value


def upper(value: object) -> object:
    """The value, in upper case if it is a string."""
    return value.upper() if isinstance(value, str) else value


Natural = Annotated[int, BeforeValidator(whole), Field(ge=0)]
"""A whole number from 0, which may be written as 5e8."""

Count = Annotated[int, BeforeValidator(whole), Field(gt=0)]
"""A whole number from 1, which may be written as 5e8."""

Rate = Annotated[float, Field(ge=0)]
"""A finite number from 0."""

Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(canonical_dtype)]
"""A floating dtype under one of DeepSpeed's names (its ``DtypeEnum``), in any case."""
