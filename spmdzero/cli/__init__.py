"""The command `spmdzero`; one file for each of its commands."""

from spmdzero.cli._app import app, ds_report

__all__ = ["app", "ds_report"]
