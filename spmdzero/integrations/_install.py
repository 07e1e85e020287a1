"""Makes spmdzero importable as `deepspeed`, for one process or for an environment."""

import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import CodeType, ModuleType
from typing import Any

import spmdzero
from spmdzero import _torch_tpu
from spmdzero._after_import import after_import
from spmdzero.compat import git_version_info
from spmdzero.compat._old_paths import code_of, is_deepspeeds
from spmdzero.errors import RefusedImportError, SpmdZeroUsageError
from spmdzero.integrations import (
    _accelerate,
    _axolotl,
    _children,
    _diffusers,
    _lengths,
    _plain_torch,
    _rows_of_devices,
    _saved_weights,
    _sentence_transformers,
    _swift,
    _trainer,
    _trl,
)
from spmdzero.integrations._initialize import initialize

NAME, VERSION = "deepspeed", git_version_info.version
_SWITCH = "USE_TORCH_XLA"
_STANDS = (
    "spmdzero stands for it here, and has the modules and names that docs/api_surface.md lists"
)


def install() -> None:
    """Makes `import deepspeed`, here and in transformers, accelerate and Lightning, give spmdzero.

    It holds for this process, even if DeepSpeed is installed. Call it before any of these packages
    is imported: when they are imported, accelerate and transformers choose a backend of their own
    for torch_xla, which trains without ZeRO.

    Raises:
        SpmdZeroUsageError: DeepSpeed, or a package with that backend, is imported already.
    """
    known = sys.modules.get(NAME)
    if known is not None and getattr(known, "initialize", None) is initialize:
        return
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if known is not None:
        raise SpmdZeroUsageError(
            f"spmdzero.integrations.install(): deepspeed is imported already, from "
            f"{getattr(known, '__file__', None)}. Call it before that, or start the script by "
            "`spmdzero run`"
        )
    refuse_other_backends()
    follow_clients()
    _children.start_one_a_host()
    _plain_torch.watch_steps()
    sys.meta_path.insert(0, _Finder(package=True))
    if os.environ.get(_children.EXPLAINED):
        # No other run waits for this import.
        from spmdzero.integrations import _explained_run

        _explained_run.begin()


def follow_clients() -> None:
    """Adapts clients when they are imported, for facts that they can't find out here."""
    _trainer.follow_imports()
    _accelerate.follow_imports()
    _lengths.follow_imports()
    _rows_of_devices.follow_imports()
    _saved_weights.follow_imports()
    _sentence_transformers.follow_imports()
    _swift.follow_imports()
    _axolotl.follow_imports()
    _trl.follow_imports()
    _diffusers.follow_imports()
    after_import("lightning", _tell_lightning)


def _tell_lightning(_: ModuleType) -> None:
    from spmdzero.integrations import _lightning_registry

    _lightning_registry.count_no_tpus()
    _lightning_registry.name_rates_by_the_scripts_optimizer()
    _lightning_registry.make_one_file_of_saved_folders()
    _lightning_registry.register_strategies()


def take_the_name(module: ModuleType) -> None:
    """Does what `install` does, in an environment with the distribution spmdzero-deepspeed.

    Args:
        module: the distribution's module `deepspeed`, which is being imported.

    Raises:
        SpmdZeroUsageError: as in `install`.
    """
    refuse_other_backends()
    sys.meta_path.insert(0, _Finder(package=False))
    fill(module)


def refuse_other_backends() -> None:
    """Turns off the backends that transformers and accelerate have for torch_xla.

    Raises:
        SpmdZeroUsageError: such a package is imported, and its backend is on; or torch_tpu is
            loaded, whose devices they would take.
    """
    if _torch_tpu.is_loaded():
        raise SpmdZeroUsageError(_torch_tpu.in_the_way())
    for name in ("accelerate.utils.imports", "transformers.utils.import_utils"):
        module = sys.modules.get(name)
        if module is not None and module.is_torch_xla_available():
            package = name.partition(".")[0]
            raise SpmdZeroUsageError(
                f"{package} was imported before spmdzero.integrations, and has chosen its own "
                "backend for torch_xla, which knows no ZeRO. Call spmdzero.integrations.install() "
                f"before `import {package}`, set {_SWITCH}=false, or start the script by "
                "`spmdzero run`"
            )
    if os.environ.setdefault(_SWITCH, "false").lower() not in ("0", "false", "no", "off"):
        raise SpmdZeroUsageError(
            f"{_SWITCH}={os.environ[_SWITCH]}: transformers and accelerate would choose their own "
            "backend for torch_xla, which knows no ZeRO. Unset it"
        )


def fill(module: ModuleType) -> None:
    """Gives `module` the names of the package deepspeed."""

    def attribute(name: str) -> Any:
        try:
            return getattr(spmdzero, name)
        except AttributeError as missing:
            raise AttributeError(
                f"module {NAME!r} has no attribute {name!r}: {_STANDS}"
            ) from missing

    names = {name: getattr(spmdzero, name) for name in spmdzero.__all__}
    parts = zip(("major", "minor", "patch"), VERSION.split("."), strict=True)
    names |= {f"__version_{part}__": int(number) for part, number in parts}
    vars(module).update(
        names, __version__=VERSION, initialize=initialize, __getattr__=attribute, __path__=[]
    )


class _Finder(MetaPathFinder):
    """Finds the submodules of deepspeed and, with `package`, the package and its metadata."""

    def __init__(self, *, package: bool) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, below = fullname.partition(".")
        if package != NAME:
            return None
        if not below:
            return ModuleSpec(fullname, _Package(), is_package=True) if self._package else None
        found = _module_for(below)
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _Same(found), is_package=is_package)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """The metadata by which accelerate and transformers see that DeepSpeed is installed."""
        named = getattr(context, "name", None)
        return [_Metadata()] if self._package and named == NAME else []


def _module_for(below: str) -> ModuleSpec:
    """The spec of the module of spmdzero that `deepspeed.<below>` names.

    Raises:
        RefusedImportError: there is no such module.
    """
    found = None
    try:
        if is_deepspeeds(below):
            found = importlib.util.find_spec(f"spmdzero.{below}")
    except RefusedImportError as refusal:
        refusal.name = f"{NAME}.{below}"
        raise
    except ModuleNotFoundError:
        # The parent is a module, not a package.
        pass
    if found is None:
        error = RefusedImportError(f"No module named '{NAME}.{below}': {_STANDS}")
        error.name = f"{NAME}.{below}"
        raise error
    return found


class _Package(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        """Lets importlib create the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module."""
        fill(module)


class _Same(Loader):
    """Loads a module of spmdzero under a second name, so that both names share its state."""

    def __init__(self, real: ModuleSpec) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> None:
        """Lets importlib create the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Puts spmdzero's module in this one's place in `sys.modules`, which importlib returns."""
        sys.modules[module.__name__] = import_module(self._real.name)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code that `python -m deepspeed.launcher.runner` runs."""
        return code_of(self._real)


class _Metadata(Distribution):
    def read_text(self, filename: str) -> str | None:
        """The text of a file of the metadata."""
        if filename != "METADATA":
            return None
        return (
            f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"
            "Summary: spmdzero by DeepSpeed's name\n"
        )

    def locate_file(self, path: Any) -> Any:
        """Returns `path` as it is: the distribution has no files."""
        return path
