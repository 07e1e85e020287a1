"""A folder of compiled programs: whole files or none, whoever writes and whoever is killed."""

import contextlib
import dataclasses
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path

from spmdzero._logging import log_once

_FIRST = b"spmdzero program 1\n"
_SUM = hashlib.sha256().digest_size
# Of files that are being written. Others keep files of theirs in a folder too, such as /tmp.
_PART = "spmdzero-", ".part"
# Seconds after which who writes one is gone: writing takes less than one.
_LEFT = 3600


@dataclasses.dataclass(frozen=True)
class Folder:
    """Bytes by key on disk.

    Attributes:
        path: of the folder, made when something is written.
    """

    path: Path

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.program"

    def read(self, key: str) -> bytes | None:
        """What was written under `key`; None where nothing was, or it is no longer that."""
        file = self._file(key)
        try:
            with file.open("rb") as opened:
                refusal, data = _refusal(os.fstat(opened.fileno())), opened.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.ignore(key, str(error))
            return None
        if refusal:
            self.ignore(key, refusal)
            return None
        head, body = data[: len(_FIRST) + _SUM], data[len(_FIRST) + _SUM :]
        # The key is in the sum: a file under another's name is damaged too.
        if head != _FIRST + _sum(key, body):
            self.ignore(key, "it is damaged, or no file of this version of spmdzero")
            return None
        return body

    def ignore(self, key: str, why: str) -> None:
        """Says that a file is not used, and will be replaced."""
        log_once(
            f"the compiled program {self._file(key)} is ignored, compiled anew and replaced: {why}"
        )

    def clear(self) -> None:
        """Removes what writers left that were killed: what is an hour old, and this user's."""
        prefix, suffix = _PART
        for file in self.path.glob(f"{prefix}*{suffix}"):
            # Another process may remove it too.
            with contextlib.suppress(OSError):
                found = file.lstat()
                if found.st_uid == os.geteuid() and found.st_mtime < time.time() - _LEFT:
                    file.unlink()

    def write(self, key: str, body: bytes) -> None:
        """Keeps `body`; where it can't be written, says so and goes on."""
        name = ""
        try:
            # It is machine code: nobody else need put some there.
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path, prefix=_PART[0], suffix=_PART[1])
            with os.fdopen(handle, "wb") as file:
                file.write(_FIRST + _sum(key, body) + body)
            os.replace(name, self._file(key))
        except OSError as error:
            log_once(f'"spmd": {{"compile_cache": "{self.path}"}} keeps nothing: {error}')
            with contextlib.suppress(OSError):
                os.unlink(name)


def _refusal(file: os.stat_result) -> str:
    """Why a file isn't read: loading it runs what was put there. Nothing where it is this user's.

    Who may only write to the folder can neither make such a file nor give one another's name.
    """
    if file.st_uid != os.geteuid():
        return f"it is another user's (number {file.st_uid}, this process is {os.geteuid()})"
    if file.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it ({stat.filemode(file.st_mode)})"
    return ""


def _sum(key: str, body: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(body)
    return digest.digest()
