"""Seeded faults: a job with a host that fails ends in time, and goes on as if nothing had been.

Each case is a chain: something happens to a host, all are started again, something happens again.
Losses are compared with those of a run that nothing happened to, bit for bit, and checkpoints with
its own, by their checksums.
"""

import dataclasses
import json
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spmdzero.backend.hosts import processes
from spmdzero.formats import newest_complete
from tests.hosts.faulty import EVERY
from tests.hosts.hosts import Host, hosts, told

HOSTS, END = 2, 60
# Whoever has not ended by then hangs: the runtimes' own time limits are minutes.
LONGEST = 120
# What a host goes on after.
HARMLESS = ("slow", "hiccup")
LASTING = ("killed", "frozen", "cut", "silent")
# Moment -> what can happen then.
KINDS = {
    "starting": ("killed", "frozen", "fails", "slow"),
    "connecting": (*LASTING, "hiccup"),
    "loading": (*LASTING, *HARMLESS, "fails", "damaged"),
    "training": (*LASTING, *HARMLESS, "fails"),
    "saving": (*LASTING, *HARMLESS, "fails", "full"),
}
ALL = [(moment, kind) for moment, kinds in KINDS.items() for kind in kinds]
QUICK = [("saving", "killed")]
FAULTS = 7
"""In a chain."""
# Every fault in an order that is drawn, and some once more, for this many chains.
FORTY = [*random.Random(1).sample(ALL, len(ALL)), *random.Random(2).sample(ALL, 40 - len(ALL))]
PARTS = 5


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happened to.

    Attributes:
        stage: its stage of ZeRO.
        losses: step -> loss.
        checksums: tag -> those of its tensors' pieces.
    """

    stage: int
    losses: dict[int, float]
    checksums: dict[str, Any]


def plan_of(folder: Path, **more: Any) -> dict[str, Any]:
    """The plan of a start in this folder at which nothing happens, and `more`."""
    return {
        "folder": str(folder / "run"), "log": str(folder / "log"), "tag": None,
        "end": END, "goal": EVERY + 1, "kind": None, "moment": "", "host": 0, "share": 0.0,
        "stage": 2, "offload": False,
    } | more  # fmt: skip


def notes(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def checksums(checkpoint: Path) -> dict[str, Any]:
    """Those of the pieces of each tensor."""
    (manifest,) = checkpoint.glob("manifest-*.json")
    tensors = json.loads(manifest.read_text())["tensors"]
    return {name: found(tensor) for name, tensor in tensors.items()}


def found(tree: Any) -> list[str]:
    """The checksums in a part of a manifest."""
    if isinstance(tree, dict):
        return [text for value in tree.values() for text in found(value)]
    if isinstance(tree, list):
        return [text for value in tree for text in found(value)]
    return [tree] if isinstance(tree, str) and len(tree) == 32 else []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), stage=2)


@pytest.fixture(scope="module")
def undisturbed_shards(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), stage=3)


def run_undisturbed(folder: Path, *, stage: int) -> Undisturbed:
    statuses, said = start(plan_of(folder, goal=END, stage=stage))
    assert statuses == [0, 0], said
    losses = {note["step"]: note["loss"] for note in notes(folder) if "loss" in note}
    tags = [path.name for path in (folder / "run").glob("global_step*")]
    assert len(losses) == END
    return Undisturbed(stage, losses, {tag: checksums(folder / "run" / tag) for tag in tags})


def start(plan: dict[str, Any]) -> tuple[list[int | None], list[str]]:
    """The status and the stderr of each host: None of one that is frozen when the others end."""
    with hosts("tests.hosts.faulty", told(plan), count=HOSTS, devices=1) as started:
        waited = [host for host in started if not is_frozen(host, plan)]
        for host in waited:
            try:
                host.wait(LONGEST)
            except subprocess.TimeoutExpired:
                said = [other.said()[1][-3000:] for other in started]
                pytest.fail(f"host {host.rank} hangs: {plan}\n{said[0]}\n--- 1:\n{said[1]}")
        return [host.process.poll() for host in started], [host.said()[1] for host in started]


def is_frozen(host: Host, plan: dict[str, Any]) -> bool:
    return plan["kind"] == "frozen" and host.rank == plan["host"]


def damage(checkpoint: Path, draw: random.Random) -> None:
    """One bit of one host's tensors is another, or their last bytes are missing."""
    file = draw.choice(sorted(checkpoint.glob("tensors-*")))
    data = bytearray(file.read_bytes())
    if draw.random() < 0.5:
        data[draw.randrange(len(data) // 2, len(data))] ^= 1 << draw.randrange(8)
    else:
        del data[-draw.randrange(1, 64) :]
    file.write_bytes(data)


def check_end(plan: dict[str, Any], statuses: list[int | None], said: list[str]) -> None:
    """Whether all have ended as they should."""
    kind, mine = plan["kind"], plan["host"]
    other, text = statuses[1 - mine], said[1 - mine]
    shown = f"{plan}\n{statuses}\n--- 0:\n{said[0][-3000:]}\n--- 1:\n{said[1][-3000:]}"
    if kind in (None, *HARMLESS):
        assert statuses == [0, 0], shown
        return
    if kind == "damaged":
        assert statuses == [1, 1], shown
        assert all("SpmdZeroCheckpointError" in text for text in said), shown
        return
    if kind == "full":
        if statuses == [0, 0]:
            # It had written its part; `Chain.start` compares the checkpoints.
            return
        # Its own stderr may be one of the files that don't grow any more.
        assert statuses[mine] == 1, shown
        assert other in (1, processes.STATUS), shown
        assert "File too large" in text, shown
        return
    assert other in (1, processes.STATUS), shown
    if plan["moment"] == "saving" and f"can't be saved: process {mine}: " in text:
        # It was told so by the message of a save that failed, before the watch saw it.
        assert (kind, statuses) == ("fails", [1, 1]), shown
        return
    met = other == processes.STATUS and "has not met the others" not in text
    if met:
        assert f"spmdzero: host {mine} (" in text, shown
    else:
        assert plan["moment"] in ("starting", "connecting"), shown


class Chain:
    """Starts of one run, one after the other."""

    def __init__(self, folder: Path, undisturbed: Undisturbed) -> None:
        self.folder, self.undisturbed = folder, undisturbed
        self.tag: str | None = None

    def start(self, **more: Any) -> dict[str, Any]:
        """One start; checks how it ends, and what is there then."""
        before, saved = len(notes(self.folder)), self.saved()
        plan = self.plan(tag=self.tag, **more)
        statuses, said = start(plan)
        check_end(plan, statuses, said)
        for note in notes(self.folder)[before:]:
            if "resumed" in note and plan["tag"] is None:
                assert note["resumed"] >= saved, "it lost a complete checkpoint"
            if "loss" in note:
                assert note["loss"] == self.undisturbed.losses[note["step"]], note
        self.tag = None
        newest = self.newest()
        assert int((newest or "0").removeprefix("global_step")) >= self.saved()
        if newest is not None:
            own = checksums(self.folder / "run" / newest)
            assert own == self.undisturbed.checksums[newest]
        return plan

    def plan(self, **more: Any) -> dict[str, Any]:
        return plan_of(self.folder, stage=self.undisturbed.stage, **more)

    def saved(self) -> int:
        """The step of the newest checkpoint that a save has returned from."""
        return max((note["saved"] for note in notes(self.folder) if "saved" in note), default=0)

    def newest(self) -> str | None:
        """The tag of the newest complete checkpoint."""
        return newest_complete(self.folder / "run")


def run_chain(
    folder: Path, undisturbed: Undisturbed, faults: Sequence[tuple[str, str]], *, seed: str
) -> None:
    """A run to which these (moment, kind) happen, one a start, and then nothing any more."""
    draw = random.Random(seed)
    chain = Chain(folder, undisturbed)
    if any(moment == "loading" for moment, _ in faults):
        # There has to be something; and where it is damaged, another one.
        chain.start(goal=2 * EVERY + 1)
    for moment, kind in faults:
        if kind == "damaged":
            refuse_damaged(chain, draw)
            chain.start()
        else:
            chain.start(kind=kind, moment=moment, host=draw.randrange(HOSTS), share=draw.random())
    chain.start()
    assert notes(folder)[-1] == {"done": True}


def refuse_damaged(chain: Chain, draw: random.Random) -> None:
    """Damages the newest checkpoint: every host refuses it, and names the one before."""
    newest = chain.newest()
    assert newest is not None
    path = chain.folder / "run" / newest
    kept = {file: file.read_bytes() for file in path.glob("tensors-*")}
    damage(path, draw)
    statuses, said = start(chain.plan())
    check_end(chain.plan(kind="damaged"), statuses, said)
    chain.tag = f"global_step{int(newest.removeprefix('global_step')) - EVERY}"
    assert all(f"The newest other complete tag is {chain.tag!r}" in text for text in said)
    for file, data in kept.items():
        # The next save of this tag replaces it; `Chain.start` compares what is the newest.
        file.write_bytes(data)


@pytest.mark.parametrize(("moment", "kind"), QUICK)
def test_a_run_goes_on_after_a_fault(
    moment: str, kind: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    run_chain(tmp_path, undisturbed, [(moment, kind)], seed=f"{moment} {kind}")


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "kind"), ALL)
def test_a_run_goes_on_after_each_of_many_faults(
    moment: str, kind: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    run_chain(tmp_path, undisturbed, [(moment, kind)] * FAULTS, seed=f"{moment} {kind}")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_run_of_stage_3_goes_on_after_forty_faults(
    part: int, tmp_path: Path, undisturbed_shards: Undisturbed
) -> None:
    run_chain(tmp_path, undisturbed_shards, FORTY[part::PARTS], seed=f"stage 3, {part}")


@pytest.mark.slow
def test_saves_of_states_on_the_host_that_are_killed_lose_nothing_and_go_on_there_and_without(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    draw, chain = random.Random(20), Chain(tmp_path, undisturbed)
    for number in range(20):
        chain.start(
            kind="killed", moment="saving", host=draw.randrange(HOSTS), share=draw.random(),
            offload=True,
        )  # fmt: skip
        if number % 2:
            # It compares a step's loss, and saves nothing.
            chain.start(goal=1)
    chain.start(offload=True)
    assert notes(tmp_path)[-1] == {"done": True}
    assert chain.saved() > 0
