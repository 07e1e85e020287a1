"""`python -m spmdzero`: the command, for when the script `spmdzero` is not on the path."""

from spmdzero.cli import app

app(prog_name="spmdzero")
