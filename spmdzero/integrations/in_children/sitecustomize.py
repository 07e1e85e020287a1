"""Makes a child Python of `spmdzero run` know spmdzero by the name deepspeed.

`spmdzero run` puts this folder on the PYTHONPATH of its children, as `torchrun` and `accelerate
launch` start them, and Python imports this module when it starts. It imports the standard library
only, until something asks for DeepSpeed or one of its clients.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

_CLIENTS = (
    "accelerate", "deepspeed", "lightning", "lightning_fabric", "pytorch_lightning",
    "torch.distributed.run", "transformers", "trl",
)  # fmt: skip


class _Clients:
    """Installs spmdzero as deepspeed before the first client, or DeepSpeed, is found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec that the other finders find, with spmdzero's among them from now on."""
        return find_spec(name) if name in _CLIENTS and self._install() else None

    def find_distributions(self, context: Any) -> Any:
        """The metadata of deepspeed, whose version clients ask for before they import it."""
        from importlib.metadata import distribution

        asked = getattr(context, "name", None) == "deepspeed"
        return [distribution("deepspeed")] if asked and self._install() else []

    def _install(self) -> bool:
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        if find_spec("spmdzero") is None:
            # The child is a Python of a different environment.
            return False
        from spmdzero.integrations import install

        install()
        return True


def _run_the_next() -> None:
    """Runs the module of this name that Python would have imported without this folder."""
    own = Path(__file__).parent
    found = PathFinder.find_spec(__name__, [each for each in sys.path if Path(each) != own])
    if found is not None and found.loader is not None:
        found.loader.exec_module(module_from_spec(found))


sys.meta_path.insert(0, _Clients())  # type: ignore[arg-type]
_run_the_next()
