"""`deepspeed.runtime`: the modules that scripts import names from."""
