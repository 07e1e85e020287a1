"""DeepSpeedEngine's getters, with its names and return types."""

from spmdzero.compat.getters._config_names import DeepSpeedConfigNames
from spmdzero.compat.getters._getters import ConfigGetters

__all__ = ["ConfigGetters", "DeepSpeedConfigNames"]
