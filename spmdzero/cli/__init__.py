"""The command `spmdzero`; one file for each of its commands."""

from spmdzero.cli._app import app

__all__ = ["app"]
