"""The dtype of each role of a tensor, and the loss scale of fp16."""

from spmdzero.precision._gradient_scaling import GradientScaling
from spmdzero.precision._policy import PrecisionPolicy, dtype_named, name_of
from spmdzero.precision._scaler import LossScaler, NoScale

__all__ = ["GradientScaling", "LossScaler", "NoScale", "PrecisionPolicy", "dtype_named", "name_of"]
