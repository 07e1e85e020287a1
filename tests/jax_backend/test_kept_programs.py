"""`"spmd": {"compile_cache": ...}` on JAX: what a second start finds, and what it does not take."""

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

from spmdzero.backend import runtime
from spmdzero.backend.jax import flags
from spmdzero.backend.jax.graph import _disk_cache
from spmdzero.backend.jax.graph._disk_cache import Folder
from spmdzero.backend.jax.graph._execute import Compilations, compilations
from tests.support.processes import run_module


def started(folder: Path, between: str = "relu") -> dict[str, Any]:
    """What a process of its own trains with that folder."""
    said = run_module("tests.jax_backend.kept_programs", str(folder), between, devices=2)
    return json.loads(said.splitlines()[-1])


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("programs")
    return folder, started(folder)


def test_a_second_start_lowers_and_compiles_nothing(first: tuple[Path, dict[str, Any]]) -> None:
    folder, one = first
    other = started(folder)
    assert one["programs"] == [2, 2, 0]
    assert other["programs"] == [0, 0, 2]
    assert other["losses"] == one["losses"]
    assert other["donated"] == one["donated"] > 0


def test_another_model_of_the_same_shapes_is_another_program(
    first: tuple[Path, dict[str, Any]],
) -> None:
    other = started(first[0], "tanh")
    # The states are made by the same one.
    assert other["programs"] == [1, 1, 1]
    assert other["losses"] != first[1]["losses"]


def test_what_calls_lapack_is_lowered_at_each_start(tmp_path: Path) -> None:
    one, other = started(tmp_path, "cholesky"), started(tmp_path, "cholesky")
    assert other["programs"] == [1, 1, 1]
    assert other["losses"] == one["losses"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of this process's programs for a while."""
    runtime.start()
    # A read computes whatever is recorded, also what other tests of this process left.
    runtime.sync()
    compilations.folder = _disk_cache.KeptPrograms(str(tmp_path / "kept"))
    yield tmp_path / "kept"
    compilations.folder = None


def computed(value: float = 2.0) -> tuple[float, list[int]]:
    """A sum as a process computes it that has compiled nothing; compiled, lowered, loaded."""
    compilations._kept.clear()
    compilations._with_constants.clear()
    before = counted()
    made = (torch.arange(24.0, device="xla").reshape(4, 6) * value).sum().item()
    return made, [now - then for now, then in zip(counted(), before, strict=True)]


def counted() -> list[int]:
    return [compilations.count, compilations.lowered, compilations.loaded]


COMPILED, LOADED = [1, 1, 0], [0, 0, 1]


def test_a_program_is_compiled_once_and_loaded_from_then_on(folder: Path) -> None:
    assert computed() == (552.0, COMPILED)
    assert computed() == (552.0, LOADED)
    assert computed(3.0) == (828.0, COMPILED)


def of_the_folder(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said of kept programs; an earlier test's flags may be said too."""
    return [line for line in caplog.messages if "xla_flags" not in line]


@pytest.mark.parametrize("how", ["short", "flipped", "empty", "another", "foreign"])
def test_what_is_damaged_is_ignored_said_and_replaced(
    how: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    computed(3.0)
    (others,) = folder.iterdir()
    computed()
    (file,) = (path for path in folder.iterdir() if path != others)
    whole = file.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "short": whole[:middle],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "empty": b"",
        # A whole file of this version, under the name of another.
        "another": others.read_bytes(),
        "foreign": b"no program",
    }
    file.write_bytes(damaged[how])
    with caplog.at_level(logging.INFO, "spmdzero"):
        assert computed() == (552.0, COMPILED)
    (said,) = of_the_folder(caplog)
    assert str(file) in said
    assert "ignored, compiled anew and replaced" in said
    assert computed() == (552.0, LOADED)


def test_what_others_may_have_written_is_not_run(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed()
    (file,) = folder.iterdir()
    file.chmod(0o620)
    with caplog.at_level(logging.INFO, "spmdzero"):
        assert computed() == (552.0, COMPILED)
    assert "others may write to it (-rw--w----)" in caplog.text
    assert computed() == (552.0, LOADED)
    monkeypatch.setattr("os.geteuid", lambda: file.stat().st_uid + 1)
    with caplog.at_level(logging.INFO, "spmdzero"):
        assert computed() == (552.0, COMPILED)
    assert "it is another user's" in caplog.text


def test_a_program_without_a_name_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_disk_cache, "_settings", lambda: [("jax_device", repr(object()))])
    with caplog.at_level(logging.INFO, "spmdzero"):
        assert computed() == (552.0, COMPILED)
        assert computed() == (552.0, COMPILED)
    (said,) = of_the_folder(caplog)
    assert "another in each process" in said
    assert "jax_device" in said


def test_what_jax_cannot_load_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    computed()
    (file,) = folder.iterdir()
    Folder(folder).write(file.stem, b"\0" * 64)
    with caplog.at_level(logging.INFO, "spmdzero"):
        assert computed() == (552.0, COMPILED)
    assert "JAX can't load it" in caplog.text
    assert computed() == (552.0, LOADED)


def test_a_folder_that_nobody_can_write_to_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")
    with caplog.at_level(logging.INFO, "spmdzero"):
        assert computed() == (552.0, COMPILED)
        assert computed(3.0) == (828.0, COMPILED)
    assert [line for line in caplog.messages if "keeps nothing" in line] == [
        line for line in caplog.messages if "compile_cache" in line
    ]


def test_who_is_killed_while_writing_leaves_no_program(folder: Path) -> None:
    computed()
    (file,) = folder.iterdir()
    file.rename(folder / "tmp1234.part")
    assert computed() == (552.0, COMPILED)


def test_the_name_holds_what_lowers_and_compiles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed()
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    _disk_cache._surroundings.cache_clear()
    assert computed()[1] == COMPILED
    monkeypatch.setattr(_disk_cache, "version", lambda package: "another")
    _disk_cache._surroundings.cache_clear()
    assert computed()[1] == COMPILED
    # As another version of spmdzero has.
    changed = folder.parent / "sources"
    changed.mkdir()
    (changed / "lowering.py").write_text("pass")
    monkeypatch.setattr(_disk_cache, "_BACKEND", changed)
    _disk_cache._surroundings.cache_clear()
    assert computed()[1] == COMPILED
    assert computed()[1] == LOADED
    with jax.numpy_rank_promotion("warn"):
        assert computed()[1] == COMPILED
    monkeypatch.undo()
    _disk_cache._surroundings.cache_clear()
    assert computed()[1] == LOADED


def test_no_folder_keeps_nothing() -> None:
    flags.use_cache("")
    assert compilations.folder is Compilations().folder is None


def test_a_start_removes_what_a_killed_writer_left_an_hour_ago_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", killed)
            with pytest.raises(KeyboardInterrupt):
                Folder(folder).write("a" * 64, b"half")
    old, new = folder.glob("*.part")
    Folder(folder).write("b" * 64, b"whole")
    others, kept = folder / "download.part", folder / f"{'b' * 64}.program"
    others.touch()
    for file in (old, others, kept):
        os.utime(file, (time.time() - 4000,) * 2)
    _disk_cache.KeptPrograms(str(folder))
    assert {*folder.iterdir()} == {new, others, kept}
