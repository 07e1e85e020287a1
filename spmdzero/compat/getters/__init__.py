"""DeepSpeedEngine's getters of config values, by its names and with its return types."""

from spmdzero.compat.getters._settings import ConfigGetters

__all__ = ["ConfigGetters"]
