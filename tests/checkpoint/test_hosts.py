"""Several processes save one checkpoint: each its own pieces, none a whole tensor."""

import dataclasses
import multiprocessing
from pathlib import Path

import pytest
import torch

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.store import complete_tags, open_state, save_native
from spmdzero.store._parts import report_failure
from tests.checkpoint.files import number_in, order_of, state_of


def save_part(folder: Path, process: int) -> None:
    """What one of two hosts does: of each tensor it has one of the two pieces."""
    whole = state_of(1)
    mine = {
        name: dataclasses.replace(tensor, pieces=tensor.pieces[process : process + 1])
        for name, tensor in whole.tensors.items()
    }
    host = dataclasses.replace(whole.host, rng={"torch": torch.tensor([process])})
    state = dataclasses.replace(whole, tensors=mine, host=host)
    save_native(state, order_of(folder, 1, process=process, processes=2))


def test_two_processes_make_one_checkpoint_of_their_pieces(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.starmap(save_part, [(tmp_path, 0), (tmp_path, 1)])
    assert number_in(tmp_path, "step1") == 1
    (manifest,) = complete_tags(tmp_path)
    sizes = {name: entry.size for name, entry in manifest.files.items() if "tensors" in name}
    assert len(sizes) == 2
    for process in (0, 1):
        found = open_state(tmp_path, "step1", process=process)
        assert found.host.rng is not None
        assert found.host.rng["torch"].item() == process
    # A run on more hosts has no state of theirs: they continue the first one's generators.
    later = open_state(tmp_path, "step1", process=7)
    assert later.host.rng is not None
    left = [path.name for path in (tmp_path / "step1").iterdir()]
    assert not [name for name in left if name.endswith(".tmp")]


def test_a_process_that_fails_ends_the_save_of_the_others(tmp_path: Path) -> None:
    order = order_of(tmp_path, 1, processes=2)
    (tmp_path / "step1").mkdir()
    report_failure(
        tmp_path / "step1", dataclasses.replace(order, process=1), OSError("its disk is full")
    )
    with pytest.raises(SpmdZeroCheckpointError, match="process 1: its disk is full"):
        save_native(state_of(1), order)
    assert complete_tags(tmp_path) == []
