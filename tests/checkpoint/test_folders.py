"""A folder of checkpoints beside a user's own files, copies, links, and files of somebody else."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import spmdzero
from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats import Retention, latest_tag, newest_complete
from tests.checkpoint.files import interrupted, number_in, save

TWO = Retention(last=2)


def tags_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if (path / "COMMITTED").exists())


def renamed(folder: Path) -> Path:
    return (folder / "step1").rename(folder / "best")


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(folder / "step1", folder / "best"))


def archived(folder: Path) -> Path:
    away = folder.with_name("archive")
    shutil.move(folder / "step1", away)
    (folder / "step1").symlink_to(away)
    return folder / "step1"


def linked(folder: Path) -> Path:
    (folder / "best").symlink_to("step1")
    return folder / "best"


@pytest.mark.parametrize("arrange", [copied, renamed, archived, linked])
def test_older_checkpoints_expire_and_what_a_user_made_of_one_stays(
    folder: Path, arrange: Callable[[Path], Path]
) -> None:
    runs = folder / "runs"
    for number in (1, 2):
        save(runs, number, retention=TWO)
    kept = arrange(runs)
    for number in (3, 4, 5):
        save(runs, number, retention=TWO)
        assert number_in(runs, kept.name) == 1
    own = {"step1"} if arrange in (archived, linked) else set[str]()
    assert set(tags_of(runs)) == {kept.name, "step4", "step5"} | own
    # Whatever an error names as good is there.
    assert newest_complete(runs) == "step5"
    assert number_in(runs, newest_complete(runs, but="step5") or "") == 4


def test_an_error_does_not_name_a_link_to_the_damaged_tag(folder: Path) -> None:
    for number in (1, 2):
        save(folder, number)
    (folder / "alias").symlink_to("step2")
    assert newest_complete(folder, but="step2") == "step1"


def test_a_checkpoint_that_can_not_be_deleted_is_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(folder, 1)
    # No file, though it is called as one.
    (folder / "step1" / "state-00000001-00007-of-00008.pt").mkdir()
    for number in (2, 3):
        save(folder, number, retention=Retention(last=1))
        assert latest_tag(folder) == f"step{number}"
    assert tags_of(folder) == ["step3"]
    assert "step1, which is kept no longer, can't be deleted" in caplog.text


def test_a_save_deletes_nothing_that_is_no_saves_of_the_folder(folder: Path) -> None:
    names = (
        "state-20261126.pt",
        "manifest-20261126.json",
        "tensors-deadbeef.safetensors",
        "state-deadbeef-00000-of-00001.pt",
        ".state-20261126.pt.tmp",
    )
    save(folder, 1)
    mine = [folder / at / name for at in ("exports", "step1") for name in names]
    # Two files of a checkpoint, of which nobody says that they are whole.
    mine = [path for path in mine if path.parent.name == "exports" or "-of-" not in path.name]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
    (folder / "empty").mkdir()
    hostile = folder / ".saving-deadbeef"
    hostile.mkdir()
    (hostile / "begun").write_text(json.dumps({"tag": "../exports", "processes": 1}))
    for number, tag in ((2, "step1"), (3, "step3"), (4, "step4")):
        save(folder, number, tag=tag, retention=Retention(last=1))
    assert [path.name for path in mine if not path.exists()] == []
    assert (folder / "empty").is_dir()
    assert tags_of(folder) == ["step4"]


def test_two_engines_of_a_process_take_turns_in_one_folder(folder: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()
    threads = [threading.Thread(target=save, args=(folder, number)) for number in (1, 2)]

    def hold(_: int, name: str) -> None:
        if threading.current_thread() is threads[0] and name == "fsync" and not inside.is_set():
            inside.set()
            assert go_on.wait(60)

    with interrupted(hold):
        threads[0].start()
        assert inside.wait(60)
        threads[1].start()
        threads[1].join(0.1)
        assert threads[1].is_alive()
        go_on.set()
        for thread in threads:
            thread.join()
    assert tags_of(folder) == ["step1", "step2"]
    assert latest_tag(folder) == "step2"


def vouched(folder: Path, table: Any, nonce: str = "00000001") -> None:
    """Puts another manifest in the place of a tag's, with the checksum that it has."""
    data = json.dumps(table).encode()
    (folder / f"manifest-{nonce}.json").write_bytes(data)
    line = f"manifest-{nonce}.json {len(data)} {xxhash.xxh3_128_hexdigest(data)}"
    (folder / "COMMITTED").write_text(f"spmdzero checkpoint 1: {line}\n")


def change(path: str, value: Any) -> Callable[[Any], Any]:
    def changed(table: Any) -> Any:
        inside, *keys = table, *path.split(".")
        for key in keys[:-1]:
            inside = inside[int(key) if key.isdigit() else key]
        inside[int(keys[-1]) if keys[-1].isdigit() else keys[-1]] = value
        return table

    return changed


def a_file(table: Any) -> dict[str, Any]:
    return next(iter(table["files"].values()))


OUTSIDE = "../../secret.bin"
ODD: dict[str, Callable[[Any], Any]] = {
    "a list": lambda _: [1],
    "a number": lambda _: 7,
    "nothing": lambda _: {},
    "no tensors": lambda table: {k: v for k, v in table.items() if k != "tensors"},
    "another folder's file": change("tensors.parameter/a.pieces.0.0", OUTSIDE),
    "another folder's files": lambda t: t | {"files": dict.fromkeys([OUTSIDE], a_file(t))},
    "another folder's state": change("states", [OUTSIDE]),
    "no state": change("states", []),
    "a huge shape": change("tensors.parameter/a.shape", [1 << 60]),
    "a shape of text": change("tensors.parameter/a.shape", "abc"),
    "an offset before the file": change("tensors.parameter/a.pieces.0.1", -8),
    "an offset beyond it": change("tensors.parameter/a.pieces.0.1", 1 << 40),
    "a box beyond the shape": change("tensors.parameter/a.pieces.0.2", [[0, 99], [0, 9]]),
    "a box turned round": change("tensors.parameter/a.pieces.0.2", [[8, 0], [0, 9]]),
    "a size of text": lambda t: a_file(t).update(size="abc") or t,
    "an unknown dtype": change("tensors.parameter/a.dtype", "X9"),
    "another nonce": change("nonce", "deadbeef"),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_manifest_of_any_json_with_a_right_checksum_is_refused_in_words(
    folder: Path, odd: str
) -> None:
    for number in (1, 2):
        save(folder / "runs", number)
    (folder / "secret.bin").write_bytes(bytes(4096))
    tag = folder / "runs" / "step1"
    vouched(tag, ODD[odd](json.loads((tag / "manifest-00000001.json").read_text())))
    with pytest.raises(SpmdZeroCheckpointError, match="is no manifest of a checkpoint") as caught:
        number_in(folder / "runs", "step1")
    assert caught.value.file == str(tag / "manifest-00000001.json")
    assert caught.value.newest == "step2"
    # Nor does it stand in the way of others.
    save(folder / "runs", 3, retention=Retention(last=1))
    assert "step3" in tags_of(folder / "runs")


def test_a_state_of_other_values_with_a_right_checksum_is_refused_in_words(folder: Path) -> None:
    save(folder, 1)
    (file,) = (folder / "step1").glob("state-*.pt")
    good = torch.load(file, weights_only=True)
    for content in (
        [1],
        "text",
        {"unknown": 1},
        good | {"counters": [1]},
        good | {"counters": {"global_steps": "1"}},
        good | {"applied": "1"},
        good | {"param_groups": [1]},
        good | {"client_state": 7},
        good | {"scheduler": [1]},
    ):
        torch.save(content, file)
        data = file.read_bytes()
        table = json.loads((folder / "step1" / "manifest-00000001.json").read_text())
        size = {"size": len(data), "checked": len(data)}
        table["files"][file.name] = size | {"checksum": xxhash.xxh3_128_hexdigest(data)}
        vouched(folder / "step1", table)
        with pytest.raises(SpmdZeroCheckpointError, match="can't be read") as caught:
            number_in(folder, "step1")
        assert caught.value.file == str(file)


def test_tags_that_would_be_elsewhere_or_read_as_another_are_refused_read_and_write_alike(
    folder: Path,
) -> None:
    save(folder, 1)
    elsewhere = ("../x", "a/b", "", ".hidden", "x" * 300, "\udcff", "a\0b")
    for tag in (*elsewhere, "best ", " best", "a\nb", "latest", "latest_universal"):
        for act in (save, lambda at, _, tag: number_in(at, tag)):
            with pytest.raises(spmdzero.SpmdZeroUsageError, match="the name of a folder"):
                act(folder, 2, tag=tag)
    assert tags_of(folder) == ["step1"]
    assert [path.name for path in folder.parent.iterdir() if "x_universal" in path.name] == []
    for tag in ("ünï", "a:b", "-rf", "%s", "a?*"):
        save(folder, 1, tag=tag)
        assert number_in(folder, tag) == 1
