"""torch's .pt files, read without running what is in them, and written in DeepSpeed's names."""

import os
import pickle
import types
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any, cast

import torch

from spmdzero.formats.deepspeed._scan import foreign_names
from spmdzero.formats.deepspeed._stand_ins import HARMLESS, STAND_INS

_RESAVE = "Copy the file again from where it was written, or load an older tag"


class DamagedFile(Exception):  # noqa: N818 (a cause, which the reader of the folder reports)
    """One file that can't be used.

    Attributes:
        file: which.
        reason: why.
        fix: what to do instead.
    """

    def __init__(self, *, file: Path, reason: str, fix: str = _RESAVE) -> None:
        super().__init__(f"{file}: {reason}")
        self.file, self.reason, self.fix = file, reason, fix


def read_pt(path: Path) -> Any:
    """What a .pt file holds; its tensors are mapped from the file and read when they are used.

    Only tensors, plain Python values and the records of `STAND_INS` are made
    (`torch.load(weights_only=True)`), so nothing in the file is ever run.

    Raises:
        DamagedFile: no such file, cut short or altered, or it names a class or
            function that is not on the list.
    """
    if not path.is_file():
        raise DamagedFile(file=path, reason="there is no such file, and the checkpoint needs it")
    mapped = zipfile.is_zipfile(path)
    if mapped:
        _check_sums(path)
        _refuse_code(path)
    try:
        with torch.serialization.safe_globals(_allowed()), warnings.catch_warnings():
            # torch warns of a pickle protocol that it then refuses.
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise _refusal(path, error) from error
    except (ValueError, KeyError, IndexError, AssertionError, AttributeError) as error:
        # What torch's unpickler ends with on bytes that are no pickle at all.
        raise _refusal(path, error) from error


def _refusal(path: Path, error: Exception) -> DamagedFile:
    names = foreign_names(path) if path.is_file() else []
    unknown = [name for name in names if name not in STAND_INS and name not in HARMLESS]
    if unknown:
        return _code(path, unknown)
    return DamagedFile(file=path, reason=f"torch can't read it ({_first_line(error)})")


def write_pt(value: Any, path: Path) -> None:
    """Writes a .pt file in which the records of `STAND_INS` bear their names in DeepSpeed.

    Raises:
        DamagedFile: no space, or no permission.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            torch.save(value, file, pickle_module=_DEEPSPEED_NAMES)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        raise DamagedFile(
            file=path,
            reason=f"it can't be written ({_first_line(error)})",
            fix="Free some space, or choose another folder",
        ) from error


def _allowed() -> list[Any]:
    return [(stand_in, name) for name, stand_in in (STAND_INS | HARMLESS).items()]


def _check_sums(path: Path) -> None:
    # A mapped file is read without its checksums being looked at.
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, zlib.error, RuntimeError) as error:
        raise DamagedFile(file=path, reason=f"it is damaged ({_first_line(error)})") from error
    if bad is not None:
        raise DamagedFile(file=path, reason=f"it is damaged: the checksum of {bad} is wrong")


def _refuse_code(path: Path) -> None:
    """Names every forbidden class and function, where torch would name the first it meets."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise _refusal(path, error) from error
    unknown = sorted(set(names) - STAND_INS.keys() - HARMLESS.keys())
    if unknown:
        raise _code(path, unknown)


def _code(path: Path, names: list[str]) -> DamagedFile:
    return DamagedFile(
        file=path,
        reason=f"loading it would run or build {', '.join(names)}, which a checkpoint of tensors "
        "and plain values has no need of; nothing of it was run",
        fix="If it is a class of your own in client_state, save plain values instead, or vouch "
        "for it by torch.serialization.add_safe_globals. Otherwise don't trust the file",
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(". :")


_NAMES = {stand_in: name.rpartition(".") for name, stand_in in STAND_INS.items()}


# The Python one, whose opcodes can be chosen.
class _Pickler(pickle._Pickler):
    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj not in _NAMES:
            super().save_global(obj, name)  # type: ignore[missing-attribute]
            return
        # pickle would look the name up, and DeepSpeed need not be installed.
        module, _, attribute = _NAMES[obj]
        opcode = pickle.GLOBAL + f"{module}\n{attribute}\n".encode()
        self.write(opcode)  # type: ignore[missing-attribute]
        self.memoize(obj)  # type: ignore[missing-attribute]


_DEEPSPEED_NAMES = cast(
    Any, types.SimpleNamespace(Pickler=_Pickler, dumps=pickle.dumps, __name__="pickle")
)
