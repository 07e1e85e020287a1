"""Keeps torch_xla out of a process whose backend is JAX: tensors of both have one device name.

peft, huggingface_hub, diffusers and others import torch_xla where Python finds it, as soon as they
see a tensor of that device. Its library then ends the process, because it registers what spmdzero
has registered for the device (`backend/_autocast_lists.py`).
"""

import importlib.util
import sys

_NAME = "torch_xla"
_kept_out = False


def torch_xla_is_kept_out() -> bool:
    """Whether it is installed, and can't be imported any more."""
    return _kept_out


def torch_xla_is_imported() -> bool:
    """Whether this process has it."""
    return sys.modules.get(_NAME) is not None


def keep_torch_xla_out() -> None:
    """Has `import torch_xla` raise ModuleNotFoundError from now on, and nobody find it.

    Does nothing if it is imported, or not installed.
    """
    global _kept_out
    if not torch_xla_is_imported() and importlib.util.find_spec(_NAME) is not None:
        _kept_out = True
        # Python's own word for a module that can't be imported, which `importlib.util.find_spec`
        # doesn't find either. A finder can't hide what the finders after it find.
        sys.modules[_NAME] = None  # type: ignore[assignment]
