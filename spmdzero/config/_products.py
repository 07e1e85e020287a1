"""The section ``spmd.products``."""

from typing import Literal

from pydantic import field_validator

from spmdzero.config._errors import RefusedValueError
from spmdzero.config._types import Section


class ProductsConfig(Section):
    """Matrix products of linear layers in 8 bits, forward and backward (JAX).

    Weights, gradients and what layers return keep their dtype: what is multiplied is cast, by
    scales that each step finds anew of the largest values. A layer with less than 128 inputs or
    outputs, as LoRA's, multiplies as before.

    Attributes:
        dtype: "fp8", which is e4m3, or "int8"; which of them is quicker is a matter of the chip,
            and one that isn't is refused on it.
        recipe: what has a scale: each tensor ("tensorwise"), with gradients in e5m2 if fp8; or each
            row and column of what is multiplied ("rowwise"). As torchao's recipes of these names.
            Unless written, fp8 has the first and int8 the second.
        skip: modules whose layers multiply as before, by name from anywhere on down, where * is
            anything but a dot. Unless written: "lm_head", and "router" and "gate", which choose
            experts.
    """

    dtype: Literal["fp8", "int8"]
    recipe: Literal["tensorwise", "rowwise", "auto"] = "auto"
    skip: list[str] | None = None

    @field_validator("skip")
    @classmethod
    def _names(cls, skip: list[str] | None) -> list[str] | None:
        if not all(skip or ()):
            raise RefusedValueError("a name is empty", fix='Write ["lm_head"], or [].')
        return skip

    @property
    def scaled_by(self) -> Literal["tensorwise", "rowwise"]:
        """The recipe, with the default of the dtype in the place of "auto"."""
        if self.recipe != "auto":
            return self.recipe
        return "tensorwise" if self.dtype == "fp8" else "rowwise"
