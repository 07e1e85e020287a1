"""Runs at the start of each Python in an environment with spmdzero-deepspeed.

A .pth file imports this module when Python starts, so it imports only the standard library.
"""

import os
import sys
from typing import Any, NoReturn

_OURS = os.path.join(os.path.dirname(__file__), "deepspeed.py")
# Clients whose first import is noticed, so that they can be adapted while they are imported.
_FOLLOWED = ("accelerate", "diffusers.utils.import_utils", "transformers.training_args")
_TWO = """\
this environment has two packages of the name deepspeed: DeepSpeed itself, in {theirs}, and \
spmdzero-deepspeed, which gives spmdzero that name. Keep one of them:
  spmdzero:  pip uninstall spmdzero-deepspeed; pip uninstall deepspeed; then install \
spmdzero-deepspeed again
  DeepSpeed: pip uninstall spmdzero-deepspeed; pip install --force-reinstall --no-deps deepspeed
With DeepSpeed kept, `spmdzero run train.py`, or spmdzero.integrations.install() at the start of \
a script, chooses spmdzero for one process."""


class _Refusal:
    """Makes `import deepspeed` raise with advice; the question whether it exists still works."""

    def __init__(self, theirs: str | None) -> None:
        self._theirs = theirs

    def create_module(self, spec: Any) -> None:
        """Lets importlib create the module."""

    def exec_module(self, module: Any) -> NoReturn:
        """Raises ImportError, which says how to choose a package."""
        raise ImportError(_TWO.format(theirs=self._theirs), name="deepspeed", path=self._theirs)


class _Clients:
    """Makes spmdzero follow the imports of transformers and accelerate, at the first of them."""

    def __init__(self) -> None:
        self._follows = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of the other finders, after spmdzero's own finders were added."""
        if name not in _FOLLOWED or self._follows or _is_theirs():
            return None
        self._follows = True
        from importlib.util import find_spec

        from spmdzero.integrations import follow_clients

        follow_clients()
        return find_spec(name)


def _is_theirs() -> bool:
    from importlib.machinery import PathFinder

    found = PathFinder.find_spec("deepspeed")
    return found is None or found.origin != _OURS


class _OneOfTheName:
    """Finds `deepspeed` only if the first one on the path is not spmdzero's, and refuses it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of the refusal; None for other names, and if `deepspeed` is spmdzero's."""
        if name != "deepspeed":
            return None
        from importlib.machinery import ModuleSpec, PathFinder

        found = PathFinder.find_spec(name)
        if found is None or found.origin == _OURS:
            return None
        refusal: Any = _Refusal(found.origin)
        return ModuleSpec(name, refusal, origin=found.origin)


# accelerate reads this variable during its import: its backend for torch_xla has no DeepSpeed.
os.environ.setdefault("USE_TORCH_XLA", "false")
sys.meta_path.insert(0, _OneOfTheName)
clients: Any = _Clients()
sys.meta_path.insert(0, clients)
