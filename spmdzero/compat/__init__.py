"""What DeepSpeed calls comm, ops, runtime, utils, zero, accelerator, checkpoint(ing), launcher.

Scripts import these by DeepSpeed's paths, ``spmdzero.ops.adam`` for one: see `_old_paths`.
"""
