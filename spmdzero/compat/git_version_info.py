"""`deepspeed.git_version_info`, with the version of DeepSpeed whose names spmdzero has."""

__all__ = ["accelerator_name", "git_branch", "git_hash", "installed_ops", "version"]

version = "0.19.8"
git_hash = git_branch = "unknown"
# No op is compiled from C++.
installed_ops: dict[str, bool] = {}
accelerator_name = ""
