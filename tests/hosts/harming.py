"""What can happen to a host, done by itself to itself: no rights are needed for any of it."""

import ctypes
import os
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Linux's numbers, which the module socket lacks.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
SLOW = 2.0
"""Seconds that a slow host stands still, or a network is silent that comes back."""


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint32),
    ]  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction))]


# `return 0`: of each packet that arrives nothing is let in, and so the peer gets no answer.
_NOTHING = (_Instruction * 1)(_Instruction(6, 0, 0, 0))
_LETS_NOTHING_IN = bytes(_Program(1, _NOTHING))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ValueError("row 7 has no label")


def stand_still() -> None:
    time.sleep(SLOW)


def cut() -> None:
    """Ends every connection of this process, as a network card that goes down."""
    for connection in _connections():
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It listens only, or is closed already.
            continue


def silence() -> None:
    """Loses every packet that comes to this process, for good."""
    threading.Thread(target=_lose_packets, args=(1e9,), daemon=True).start()


def hiccup() -> None:
    """Loses them for a while."""
    threading.Thread(target=_lose_packets, args=(SLOW,), daemon=True).start()


def fill_disk() -> None:
    """No file of this process grows beyond some bytes, which is how a full disk looks."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal that comes along.
    resource.setrlimit(resource.RLIMIT_FSIZE, (96, hard))


HARMS: dict[str, Callable[[], None]] = {
    "killed": kill,
    "frozen": freeze,
    "fails": fail,
    "slow": stand_still,
    "cut": cut,
    "silent": silence,
    "hiccup": hiccup,
    "full": fill_disk,
}
"""What happens -> what does it."""


def _connections() -> Iterator[socket.socket]:
    """The sockets of this process, those of C++ too."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            descriptor = int(entry.name)
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6):
                        yield found
        except OSError:
            # It was closed meanwhile.
            continue


def _lose_packets(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for connection in _connections():
            connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _LETS_NOTHING_IN)
        # For the connections that are made meanwhile.
        time.sleep(0.05)
    for connection in _connections():
        try:
            connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        except OSError:
            # It has none: it is a new one.
            continue
