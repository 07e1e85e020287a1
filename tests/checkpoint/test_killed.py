"""SIGKILL ahead of every file operation of a save: what was complete stays, nothing else claims."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats import Retention, complete_tags, latest_tag, newest_complete
from tests.checkpoint.files import interrupted, killed_at, number_in, save

Scene = Callable[[Path], None]


# What is done, and how many checkpoints are in the folder before.
SCENES: dict[str, tuple[Scene, int]] = {
    "the first save": (lambda folder: save(folder, 1), 0),
    "the next save": (lambda folder: save(folder, 3), 2),
    "the same tag again": (lambda folder: save(folder, 3, tag="step2"), 2),
    "a save that deletes older ones": (
        lambda folder: save(folder, 3, retention=Retention(last=1)),
        2,
    ),
    "a save after a killed one": (lambda folder: save(folder, 3), 2),
}


def prepare(folder: Path, scene: str) -> None:
    _, before = SCENES[scene]
    for number in range(1, before + 1):
        save(folder, number)
    if "killed" in scene:
        assert killed_at(9, lambda: save(folder, 9))
        assert killed_at(12, lambda: save(folder, 8, tag="step2"))


def operations(root: Path, scene: str) -> int:
    """How many file operations the scene has."""
    folder = root / f"{scene} counted"
    prepare(folder, scene)
    seen: list[str] = []
    with interrupted(lambda _, name: seen.append(name)):
        SCENES[scene][0](folder)
    return len(seen)


def examine(folder: Path, scene: str) -> None:
    """What holds after a kill: the old checkpoints or the new one, and a folder to go on in."""
    act, before = SCENES[scene]
    tags = {found.tag: number_in(folder, found.tag) for found in complete_tags(folder)}
    # Whatever claims to be complete is one of the states that were saved, whole.
    assert set(tags.values()) <= {1, 2, 3}
    if before:
        assert tags, "nothing is left"
        assert max(tags.values()) >= 2, "the newest complete checkpoint was lost"
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir() and path.name not in tags and not path.name.startswith("."):
            with pytest.raises(SpmdZeroCheckpointError, match="cut short"):
                number_in(folder, path.name)
    newest = max(tags.values(), default=None)
    good = newest_complete(folder)
    assert (number_in(folder, good) if good else None) == newest
    latest = latest_tag(folder)
    if latest is not None:
        # The one before the last, where the kill came between the commit and `latest`.
        assert number_in(folder, latest) >= before
    act(folder)
    named = latest_tag(folder)
    assert named is not None
    assert number_in(folder, named) == (3 if before else 1)
    left = [p.name for p in folder.rglob(".*") if p.name != ".spmdzero.lock"]
    assert not left, "a killed save's leftovers were not removed"
    assert all((p / "COMMITTED").exists() for p in folder.iterdir() if p.is_dir())


def check(root: Path, scene: str, point: int, torn: float | None) -> None:
    folder = root / f"{point}-{torn}"
    prepare(folder, scene)
    assert killed_at(point, lambda: SCENES[scene][0](folder), torn=torn)
    examine(folder, scene)
    shutil.rmtree(folder)


@pytest.mark.parametrize("scene", SCENES)
def test_a_save_killed_at_any_file_operation_loses_nothing_and_claims_nothing(
    folder: Path, scene: str
) -> None:
    total = operations(folder, scene)
    for point in random.Random(1).sample(range(total), 12):
        check(folder, scene, point, None)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_a_thousand_kills_at_every_operation_and_inside_of_writes(folder: Path, scene: str) -> None:
    draw = random.Random(2)
    total, done = operations(folder, scene), 0
    while done < 210:
        for point in range(total):
            check(folder, scene, point, None if done < total else draw.random())
            done += 1


def test_the_operations_that_are_counted_are_all_there_are(folder: Path) -> None:
    # A kill ahead of the last one leaves something to do, a kill after it nothing.
    for scene, (act, _) in SCENES.items():
        total = operations(folder, scene)
        prepare(folder / scene, scene)
        assert not killed_at(total, lambda act=act, scene=scene: act(folder / scene))
