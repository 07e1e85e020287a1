"""`deepspeed.launcher`: the name that launchers read the environment file by."""
