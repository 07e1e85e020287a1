"""A folder of compiled programs, whose files are whole even if writers race or are killed."""

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
# Prefix and suffix of unfinished files. The folder may have files of others too, as /tmp does.
_PART = "spmdzero-", ".part"
# Age in seconds after which an unfinished file is abandoned: writing takes less than one.
_LEFT = 3600


@dataclasses.dataclass(frozen=True)
class Folder:
    """Files with bytes, by key.

    Attributes:
        path: the folder, which the first write creates.
    """

    path: Path

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.program"

    def read(self, key: str) -> bytes | None:
        """The bytes written under `key`; None where there are none, or they are damaged."""
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
        # The checksum includes the key: a file under another's name counts as damaged.
        if head != _FIRST + _sum(key, body):
            self.ignore(key, "it is damaged, or no file of this version of spmdzero")
            return None
        return body

    def ignore(self, key: str, why: str) -> None:
        """Logs that a file is not used, and will be replaced."""
        log_once(
            f"the compiled program {self._file(key)} is ignored, compiled anew and replaced: {why}"
        )

    def clear(self) -> None:
        """Removes unfinished files of killed writers: those of this user that are an hour old."""
        prefix, suffix = _PART
        for file in self.path.glob(f"{prefix}*{suffix}"):
            # Another process may have removed it meanwhile.
            with contextlib.suppress(OSError):
                found = file.lstat()
                if found.st_uid == os.geteuid() and found.st_mtime < time.time() - _LEFT:
                    file.unlink()

    def write(self, key: str, body: bytes) -> None:
        """Writes `body`; if that fails, logs it and goes on."""
        name = ""
        try:
            # The files are machine code: no other user should be able to write there.
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
    """The reason why a file must not be read, since loading runs it; empty if it is this user's.

    A user who may only write to the folder can neither make such a file nor rename one.
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
