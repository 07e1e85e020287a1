"""DeepSpeed's modules comm, ops, runtime, utils, zero, accelerator, checkpointing, launcher.

Scripts import them by DeepSpeed's paths, for example ``spmdzero.ops.adam``: see `_old_paths`.
"""
