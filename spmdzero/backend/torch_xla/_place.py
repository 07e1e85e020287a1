"""Where in the user's code Python is, for errors."""

import os
import sys
from pathlib import Path

import torch
from torch import nn

# Frames in these are not the user's code, nor are those of Python's own library.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_PYTHON = str(Path(os.__file__).parent)


def place(owner: nn.Module | None = None) -> str:
    """`file:line (in submodule "h.0.attn")` of the user's code that is running.

    Args:
        owner: the module to name submodules of, None to name none.
    """
    where, module = "in the forward pass", None
    frame = sys._getframe(1)
    while frame is not None:
        # A look at its locals keeps them alive as long as the frame, before Python 3.13.
        if owner is not None and module is None and "self" in frame.f_code.co_varnames[:1]:
            candidate = frame.f_locals.get("self")
            module = next((n for n, m in owner.named_modules() if m is candidate), None)
        file = frame.f_code.co_filename
        pythons = file.startswith(_PYTHON) and "site-packages" not in file
        library = pythons or file.startswith((*_LIBRARIES, "<"))
        if not library and where == "in the forward pass":
            where = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    if module is None:
        return where
    return f"{where} (in {'submodule ' + repr(module) if module else 'the model'})"
