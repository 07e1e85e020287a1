"""DeepSpeedEngine's methods that have no meaning here: each raises one clear error."""

from typing import TYPE_CHECKING

from spmdzero.compat.refusals import refused_methods

if TYPE_CHECKING:
    RefusedMethods = object
else:
    RefusedMethods = refused_methods("DeepSpeedEngine")
