"""The folder that `spmdzero run` puts on the path of child Pythons."""
