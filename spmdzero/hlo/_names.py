"""What the names of operations tell."""

import re

# torch_xla ends a name with it; on JAX what the operation is made of stands behind it.
_TORCHS = re.compile(r"(?:^|/)(aten__\w+)(?=/|$)")


def operation_of(op_name: str) -> str:
    """The operation that an `op_name` tells: torch's, such as ``aten::mm``, else its last part."""
    found = _TORCHS.search(op_name)
    name = found[1] if found else op_name.rpartition("/")[2]
    return name.replace("__", "::", 1)
