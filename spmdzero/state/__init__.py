"""The training state of an engine, and its conversion to and from checkpoints."""
