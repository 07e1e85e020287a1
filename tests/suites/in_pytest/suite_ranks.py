"""Runs each test in a child process that drives as many devices as the test wants ranks.

DeepSpeed's tests start a process for each rank. In spmdzero's place of it one process has all
devices. Nothing of a test is left for the next one.
"""

import contextlib
import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from _pytest.outcomes import Skipped

_SECONDS = 240
# What a function that isn't of DeepSpeed's class of distributed tests finds.
_DEVICES = 1

# Modules that tests import late, by what their names begin with.
_KEPT = ("spmdzero.", "jax.", "torch.")
_imported: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    _in_a_child(_DEVICES, lambda: pyfuncitem.obj(**arguments))
    return True


def in_one_process(test: Any, ranks: int) -> None:
    """Runs a test or a fixture of DeepSpeed's classes; `common.py` is bent to call it."""

    def run() -> None:
        import deepspeed

        if test.init_distributed:
            deepspeed.init_distributed()
        test.run(**test._fixture_kwargs)

    _in_a_child(ranks, run)


def _in_a_child(devices: int, run: Callable[[], None]) -> None:
    # Forked, as imports take seconds; no device is used before.
    _import_what_others_did()
    forked = multiprocessing.get_context("fork")
    here, there = forked.Pipe(duplex=False)
    child = forked.Process(target=_tell, args=(there, devices, run))
    child.start()
    there.close()
    try:
        outcome, text, modules = here.recv() if here.poll(_SECONDS) else ("hung", "", [])
        _imported.update(modules)
    except EOFError:
        child.join()
        outcome, text = "failed", f"the process ended with {child.exitcode}"
    if outcome == "hung":
        child.kill()
    child.join()
    if outcome == "skipped":
        pytest.skip(text)
    if outcome != "passed":
        pytest.fail(text or f"not at its end after {_SECONDS} s", pytrace=False)


def _import_what_others_did() -> None:
    for name in sorted(_imported - sys.modules.keys()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _tell(there: Connection, devices: int, run: Callable[[], None]) -> None:
    os.environ["CPU_NUM_DEVICES"] = str(devices)
    # `spmdzero run` may have said the number of devices to JAX itself.
    os.environ.pop("XLA_FLAGS", None)
    try:
        run()
    except Skipped as skipped:
        said = ("skipped", str(skipped.msg))
    except BaseException:
        said = ("failed", traceback.format_exc())
    else:
        said = ("passed", "")
    there.send((*said, [name for name in sys.modules if name.startswith(_KEPT)]))
    # At once: what the parent does at its end isn't the child's to do.
    os._exit(0)
