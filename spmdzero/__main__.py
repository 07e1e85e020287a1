"""`python -m spmdzero`: the command, where the script `spmdzero` is not on the path."""

from spmdzero.cli import app

app(prog_name="spmdzero")
