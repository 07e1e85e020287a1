"""What has to happen in each Python of an environment with spmdzero-deepspeed, before any import.

Its .pth file imports this when Python starts, so nothing but the standard library is imported here.
"""

import os
import sys
from typing import Any, NoReturn

_OURS = os.path.join(os.path.dirname(__file__), "deepspeed.py")
# The first of them that is imported: what they have to be told is told while they are.
_FOLLOWED = ("accelerate", "transformers.training_args")
_TWO = """\
this environment has two packages of the name deepspeed: DeepSpeed itself, in {theirs}, and \
spmdzero-deepspeed, which gives spmdzero that name. Keep one of them:
  spmdzero:  pip uninstall spmdzero-deepspeed; pip uninstall deepspeed; then install \
spmdzero-deepspeed again
  DeepSpeed: pip uninstall spmdzero-deepspeed; pip install --force-reinstall --no-deps deepspeed
With DeepSpeed kept, `spmdzero run train.py`, or spmdzero.integrations.install() at the start of \
a script, chooses spmdzero for one process."""


class _Refusal:
    """Loads nothing: `import deepspeed` says what to do, while asking whether it is there works."""

    def __init__(self, theirs: str | None) -> None:
        self._theirs = theirs

    def create_module(self, spec: Any) -> None:
        """Leaves the making to importlib."""

    def exec_module(self, module: Any) -> NoReturn:
        """Raises ImportError, which says how to choose."""
        raise ImportError(_TWO.format(theirs=self._theirs), name="deepspeed", path=self._theirs)


class _Clients:
    """Has spmdzero follow the imports of transformers and accelerate, once one of them is there."""

    def __init__(self) -> None:
        self._follows = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """What the other finders say, after spmdzero's own are among them."""
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
    """Finds `deepspeed` only where the first one on the path is not ours: to refuse it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of the refusal; None for all other names, and where `deepspeed` is ours."""
        if name != "deepspeed":
            return None
        from importlib.machinery import ModuleSpec, PathFinder

        found = PathFinder.find_spec(name)
        if found is None or found.origin == _OURS:
            return None
        refusal: Any = _Refusal(found.origin)
        return ModuleSpec(name, refusal, origin=found.origin)


# accelerate asks for it while it is imported: its own backend for torch_xla knows no DeepSpeed.
os.environ.setdefault("USE_TORCH_XLA", "false")
sys.meta_path.insert(0, _OneOfTheName)
clients: Any = _Clients()
sys.meta_path.insert(0, clients)
