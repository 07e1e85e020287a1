"""Reads operations from names in HLO."""

import re

# torch_xla ends a name with this; on JAX the parts of the operation follow it.
_TORCHS = re.compile(r"(?:^|/)(aten__\w+)(?=/|$)")


def operation_of(op_name: str) -> str:
    """The operation in an `op_name`: torch's, such as ``aten::mm``, else the last part."""
    found = _TORCHS.search(op_name)
    name = found[1] if found else op_name.rpartition("/")[2]
    return name.replace("__", "::", 1)
