"""torch's .pt files, read without running their contents, and written with DeepSpeed's names."""

import pickle
import pickletools
import re
import types
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any, cast

import torch

from spmdzero.errors import SpmdZeroCheckpointError, SpmdZeroUsageError
from spmdzero.formats._files import save_torch
from spmdzero.formats._safe_values import SAFE, made, safe_values
from spmdzero.formats.deepspeed._pickled_classes import STAND_INS

_PLAIN = ("torch", "collections", "_codecs")


def foreign_names(path: Path) -> list[str]:
    """The sorted names, ``module.name``, in the pickle of a .pt file, without torch's own.

    Reads every pickle protocol, zipped or not: for messages about a file that torch has refused.
    """
    found: set[str] = set()
    for data in _pickles(path):
        found |= _names(data)
    return sorted(name for name in found if not name.startswith(tuple(f"{p}." for p in _PLAIN)))


def _pickles(path: Path) -> list[bytes]:
    if not zipfile.is_zipfile(path):
        return [path.read_bytes()]
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]


def _names(data: bytes) -> set[str]:
    found: set[str] = set()
    memo: dict[int, str] = {}
    texts = ["", ""]
    at = 0
    while at < len(data):
        start = at
        try:
            for operation, argument, place in pickletools.genops(data[start:]):
                at = start + (place or 0) + 1
                kind = operation.name
                if kind in ("GLOBAL", "INST"):
                    found.add(str(argument).replace(" ", "."))
                elif kind == "STACK_GLOBAL":
                    found.add(".".join(texts[-2:]))
                elif "UNICODE" in kind:
                    texts.append(str(argument))
                elif kind == "MEMOIZE":
                    memo[len(memo)] = texts[-1]
                elif kind in ("BINPUT", "LONG_BINPUT", "PUT"):
                    memo[int(argument)] = texts[-1]  # type: ignore[arg-type]
                elif kind in ("BINGET", "LONG_BINGET", "GET"):
                    texts.append(memo.get(int(argument), ""))  # type: ignore[arg-type]
        except ValueError:
            # There are no more pickles: in an old .pt file the storages' bytes follow.
            break
    return found


_RESAVE = "Copy the file again from where it was written, or load an older tag"
_RUNS = (
    "loading it would run or build {}, which a checkpoint of tensors and plain values has no need "
    "of; nothing of it was run"
)
_VOUCH = (
    "If it is a class of your own in client_state, save plain values instead, or vouch for it by "
    "torch.serialization.add_safe_globals. Otherwise don't trust the file"
)
_REFUSED = re.compile(r"Unsupported global: GLOBAL (\S+)")
_TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Errors of torch's unpickler for bytes that are no pickle at all.
_NO_PICKLE = (ValueError, KeyError, IndexError, AssertionError, AttributeError)


def damaged(file: Path, reason: str, fix: str = _RESAVE) -> SpmdZeroCheckpointError:
    """The error that a file can't be used, with advice."""
    return SpmdZeroCheckpointError(file=file, reason=reason, fix=fix)


def read_pt(path: Path) -> Any:
    """The content of a .pt file; tensors are mapped from the file and read when they are used.

    Only tensors, plain Python values, those of `SAFE` and the records of `STAND_INS` are made
    (`torch.load(weights_only=True)`), so that nothing in the file is ever run.

    Raises:
        SpmdZeroCheckpointError: there is no such file, it is cut short or altered, or it names a
            class or function that is not allowed.
    """
    if not path.is_file():
        raise damaged(path, "there is no such file, and the checkpoint needs it")
    mapped = zipfile.is_zipfile(path)
    if mapped:
        _check_sums(path)
    try:
        with safe_values(STAND_INS), warnings.catch_warnings():
            # torch warns about a pickle protocol before it refuses it.
            warnings.simplefilter("ignore", UserWarning)
            return made(torch.load(path, map_location="cpu", mmap=mapped, weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, *_NO_PICKLE) as error:
        # torch's error names only the first forbidden class or function.
        unknown = sorted(set(foreign_names(path)) - STAND_INS.keys() - SAFE.keys() - _vouched())
        unknown = unknown or _REFUSED.findall(str(error))
        if unknown:
            raise damaged(path, _RUNS.format(", ".join(unknown)), _VOUCH) from error
        raise damaged(path, f"torch can't read it ({_first_line(error)})") from error


def write_pt(value: Any, path: Path) -> None:
    """Writes a .pt file in which the records of `STAND_INS` have their DeepSpeed names.

    Raises:
        OSError: no space, or no permission.
        SpmdZeroUsageError: `value` holds an object that can't be pickled.
    """
    try:
        save_torch(value, path, pickle_module=_DEEPSPEED_NAMES)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SpmdZeroUsageError(
            f"{path.name} can't be written: {_first_line(error)}. Save plain values in client_state"
        ) from error
    except RuntimeError as error:
        raise OSError(f"{path} can't be written ({_first_line(error)})") from error


def _check_sums(path: Path) -> None:
    # A mapped file is read without checking its checksums.
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, zlib.error, RuntimeError) as error:
        raise damaged(path, f"it is damaged ({_first_line(error)})") from error
    if bad is not None:
        raise damaged(path, f"it is damaged: the checksum of {bad} is wrong")


def _vouched() -> set[str]:
    """Names of the classes and functions that the user has declared safe."""
    found = torch.serialization.get_safe_globals()
    return {
        item[1] if isinstance(item, tuple) else f"{item.__module__}.{item.__qualname__}"
        for item in found
    }


def _first_line(error: BaseException) -> str:
    # torch writes for terminals, and puts the error after its advice to trust the file.
    lines = _TERMINAL.sub("", str(error)).strip().splitlines() or [""]
    own = [line.strip() for line in lines if "WeightsUnpickler error: " in line]
    text = own[0].removeprefix("WeightsUnpickler error: ") if own else lines[0]
    return f"{type(error).__name__}: {text}".rstrip(". :")


_NAMES = {stand_in: name.rpartition(".") for name, stand_in in STAND_INS.items()}


# Use pickle's Python class, in which opcodes can be chosen.
class _Pickler(pickle._Pickler):
    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj not in _NAMES:
            super().save_global(obj, name)  # type: ignore[missing-attribute]
            return
        # pickle would look the name up, but DeepSpeed need not be installed.
        module, _, attribute = _NAMES[obj]
        opcode = pickle.GLOBAL + f"{module}\n{attribute}\n".encode()
        self.write(opcode)  # type: ignore[missing-attribute]
        self.memoize(obj)  # type: ignore[missing-attribute]


_DEEPSPEED_NAMES = cast(
    Any, types.SimpleNamespace(Pickler=_Pickler, dumps=pickle.dumps, __name__="pickle")
)
