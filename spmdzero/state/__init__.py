"""The training state of an engine: what it is, and how it becomes that of a checkpoint."""
