"""DeepSpeedEngine's getters of config values, by its names and with its return types."""
