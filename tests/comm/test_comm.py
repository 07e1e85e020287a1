"""`spmdzero.comm`: alone without a launcher, and two processes with one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero import comm
from spmdzero.backend import Mesh, current
from spmdzero.backend.hosts import _launched as _single_process
from tests.support.processes import environment, free_port

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    port = free_port()
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.comm.two_processes"],
            cwd=ROOT,
            env=environment(
                PJRT_DEVICE="CPU",
                CPU_NUM_DEVICES="1",
                RANK=str(rank),
                LOCAL_RANK="0",
                WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    for child, (_, errors) in zip(children, outputs, strict=True):
        assert child.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


# Rank 0 has [1, 2, ...], rank 1 twice that.
EXPECTED: dict[str, tuple[Any, Any]] = {
    "rank": (0, 1),
    "world": (2, 2),
    "all_reduce SUM": ([3, 6], [3, 6]),
    "all_reduce AVG": ([1.5, 3], [1.5, 3]),
    "all_reduce MAX": ([2, 4], [2, 4]),
    "all_reduce async": ([3, 6], [3, 6]),
    "reduce": (None, [3, 6]),
    "broadcast": ([2, 4], [2, 4]),
    "all_gather": ([[1, 2], [2, 4]], [[1, 2], [2, 4]]),
    "all_gather_into_tensor": ([1, 2, 2, 4], [1, 2, 2, 4]),
    "reduce_scatter_tensor": ([3, 6], [9, 12]),
    "reduce_scatter": ([1.5, 3], [4.5, 6]),
    "gather": ([[1, 2], [2, 4]], None),
    "scatter": ([2, 4], [6, 8]),
    "all_to_all_single": ([1, 2], [2, 4]),
    "all_to_all": ([[[1, 2]], [[2, 4]]], [[[3, 4]], [[6, 8]]]),
    "all_gather_object": ([{"rank": 0}, {"rank": 1}], [{"rank": 0}, {"rank": 1}]),
    "broadcast_object_list": ([{"from": 1}], [{"from": 1}]),
    "send and recv": ([2, 4], [1, 2]),
    "batch_isend_irecv": ([2, 4], [1, 2]),
    "new_group": ([-1, -1], [0, 1]),
    "ranks": ([0, 1], [0, 1]),
    "everyones": (["tag0", "tag1"], ["tag0", "tag1"]),
    "none fails": (True, True),
    "device tensor": (["xla:0", [3, 6]], ["xla:0", [3, 6]]),
    "torch's, of device tensors": ([[3, 6], [[1, 2], [2, 4]]], [[3, 6], [[1, 2], [2, 4]]]),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_two_processes_agree_with_torch_distributed(both: list[dict], name: str) -> None:
    assert (both[0][name], both[1][name]) == EXPECTED[name]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_host_fails_with_before_a_save_is_raised_by_both(
    both: list[dict], failing: int
) -> None:
    assert both[failing][f"{failing} fails"] == ["ValueError", "no space"]
    kind, message = both[1 - failing][f"{failing} fails"]
    assert kind == "SpmdZeroCheckpointError"
    assert message.startswith(f"runs: can't be saved: process {failing}: no space")


@pytest.mark.skipif(current().name == "jax", reason="JAX's runtime connects them")
def test_processes_that_the_device_runtime_does_not_connect_are_refused(both: list[dict]) -> None:
    kind, message = both[0]["not connected"]
    assert kind == "SpmdZeroRuntimeError"
    assert "2 processes were started. torch_xla's runtime of the CPU connects no" in message
    assert "set SPMDZERO_BACKEND=jax for all hosts" in message


class TestOneProcess:
    def test_nothing_has_to_be_initialised_first(self) -> None:
        assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
        assert comm.get_world_group().size() == 1

    @pytest.mark.parametrize("device", ["cpu", "xla:0"])
    def test_a_reduction_over_one_process_changes_nothing(self, device: str, mesh: Mesh) -> None:
        comm.init_distributed()
        tensor = torch.tensor([1.0, 2.0]).to(device)
        for op in (comm.ReduceOp.SUM, comm.ReduceOp.AVG, torch.distributed.ReduceOp.MAX):
            assert comm.all_reduce(tensor, op=op) is None
            assert tensor.tolist() == [1.0, 2.0]
        assert comm.all_reduce(tensor, async_op=True).wait()

    def test_gathering_into_device_tensors_fills_them_in_place(self, mesh: Mesh) -> None:
        comm.init_distributed()
        own, gathered = torch.tensor([1.0, 2.0]).to("xla:0"), torch.zeros(2).to("xla:0")
        comm.all_gather([gathered], own)
        assert gathered.tolist() == [1.0, 2.0]

    def test_init_distributed_is_one_function(self) -> None:
        assert comm.init_distributed is spmdzero.init_distributed

    def test_a_launcher_of_one_process_keeps_its_port(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
        for name, value in (launched | {"MASTER_PORT": "29632"}).items():
            monkeypatch.setenv(name, value)
        _single_process.name_the_only_process(port=29500)
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("localhost", "29632")

    def test_dist_init_required_false_after_it_was_done_passes(self) -> None:
        comm.init_distributed()
        comm.init_distributed(dist_init_required=False)

    def test_a_message_needs_isend_or_irecv(self) -> None:
        with pytest.raises(spmdzero.SpmdZeroUsageError, match="isend or"):
            comm.P2POp(comm.send, torch.zeros(1), 0)


# As `torchrun --nproc-per-node 1` sets it; nothing listens on the port.
TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}


@pytest.mark.parametrize(
    ("who", "variables"), [("nobody", {}), ("users", {}), ("torchrun", TORCHRUN)]
)
def test_a_lone_process_has_a_group_after_initialize(who: str, variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.comm.after_initialize", who],
        cwd=ROOT,
        env=environment(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2", **variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # No word of a group that nobody has destroyed, and none of gloo's.
    assert all("[spmdzero]" in line for line in done.stderr.splitlines()), done.stderr
    # gloo's own line comes before, where the script has made the group.
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["place"] == [0, 1, "gloo"]
    assert found["users"]
    assert list(found["collectives"].values()) == [[1.0, 2.0]] * 6
    assert found["environment"] == []
    assert found.get("step after it", True)
