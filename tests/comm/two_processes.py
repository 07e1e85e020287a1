"""What each of two processes does; prints its results as JSON. Run by test_comm.py."""

import json
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from spmdzero import comm
from spmdzero.backend import current, runtime
from spmdzero.backend.hosts import processes
from spmdzero.plan import MeshSpec
from spmdzero.state._same_on_hosts import everyones, together


def own(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) * (rank + 1)


def reductions(found: dict[str, object], rank: int) -> None:
    for op in ("SUM", "AVG", "MAX"):
        tensor = own(rank, 2)
        comm.all_reduce(tensor, op=comm.ReduceOp[op])
        found[f"all_reduce {op}"] = tensor.tolist()
    tensor = own(rank, 2)
    comm.all_reduce(tensor, async_op=True).wait()
    found["all_reduce async"] = tensor.tolist()
    tensor = own(rank, 2)
    comm.reduce(tensor, dst=1)
    found["reduce"] = tensor.tolist() if rank == 1 else None
    part = torch.zeros(2)
    comm.reduce_scatter_tensor(part, own(rank, 4))
    found["reduce_scatter_tensor"] = part.tolist()
    part = torch.zeros(2)
    comm.reduce_scatter(part, list(own(rank, 2, 2)), op=comm.ReduceOp.AVG)
    found["reduce_scatter"] = part.tolist()


def transfers(found: dict[str, object], rank: int, world: int) -> None:
    tensor = own(rank, 2)
    comm.broadcast(tensor, src=1)
    found["broadcast"] = tensor.tolist()
    listed = [torch.zeros(2) for _ in range(world)]
    comm.all_gather(listed, own(rank, 2))
    found["all_gather"] = [t.tolist() for t in listed]
    whole = torch.zeros(4)
    comm.all_gather_into_tensor(whole, own(rank, 2))
    found["all_gather_into_tensor"] = whole.tolist()
    listed = [torch.zeros(2) for _ in range(world)] if rank == 0 else None
    comm.gather(own(rank, 2), listed, dst=0)
    found["gather"] = [t.tolist() for t in listed] if listed else None
    part = torch.zeros(2)
    comm.scatter(part, list(own(rank, 2, 2)) if rank == 1 else None, src=1)
    found["scatter"] = part.tolist()
    whole = torch.zeros(2)
    comm.all_to_all_single(whole, own(rank, 2))
    found["all_to_all_single"] = whole.tolist()
    listed = [torch.zeros(1, 2) for _ in range(world)]
    comm.all_to_all(listed, [row[None] for row in own(rank, 2, 2)])
    found["all_to_all"] = [t.tolist() for t in listed]


def messages(found: dict[str, object], rank: int) -> None:
    other = 1 - rank
    objects: list[object] = [None, None]
    comm.all_gather_object(objects, {"rank": rank})
    found["all_gather_object"] = objects
    objects = [{"from": rank}]
    comm.broadcast_object_list(objects, src=1)
    found["broadcast_object_list"] = objects
    message = torch.zeros(2)
    if rank == 0:
        comm.send(own(rank, 2), dst=1)
        comm.recv(message, src=1)
    else:
        comm.recv(message, src=0)
        comm.send(own(rank, 2), dst=0)
    found["send and recv"] = message.tolist()
    message = torch.zeros(2)
    handles = comm.batch_isend_irecv(
        [comm.P2POp(comm.irecv, message, other), comm.P2POp(comm.isend, own(rank, 2), other)]
    )
    for handle in handles:
        handle.wait()
    found["batch_isend_irecv"] = message.tolist()


def decisions(found: dict[str, object], rank: int, world: int) -> None:
    with mock.patch.object(runtime, "process_count", return_value=world):
        found["everyones"] = everyones(f"tag{rank}")
        for failing in range(world):
            try:
                with together(Path("runs"), doing="saved"):
                    if rank == failing:
                        raise ValueError("no space")
            except Exception as error:
                found[f"{failing} fails"] = [type(error).__name__, str(error)]
        with together(Path("runs"), doing="saved"):
            found["none fails"] = True


def main() -> None:
    comm.init_distributed(dist_backend="nccl")
    rank, world = comm.get_rank(), comm.get_world_size()
    found: dict[str, object] = {"rank": rank, "world": world}
    reductions(found, rank)
    transfers(found, rank, world)
    messages(found, rank)
    single = comm.new_group([1])
    found["new_group"] = [comm.get_rank(single), comm.get_world_size(single)]
    found["ranks"] = comm.get_all_ranks_from_group()
    # JAX's backend uploads to the devices of a mesh.
    current().mesh(MeshSpec.resolve({"fsdp": -1}, device_count=runtime.device_count()))
    device = own(rank, 2).to(runtime.device())
    comm.all_reduce(device)
    found["device tensor"] = [str(device.device), device.tolist()]
    summed = own(rank, 2).to(runtime.device())
    gathered = [torch.zeros_like(summed) for _ in range(world)]
    dist.all_gather(gathered, summed)
    dist.all_reduce(summed)
    found["torch's, of device tensors"] = [summed.tolist(), [t.tolist() for t in gathered]]
    comm.monitored_barrier()
    comm.barrier()
    decisions(found, rank, world)
    try:
        processes.connect(required=None)
    except Exception as error:
        found["not connected"] = [type(error).__name__, str(error)]
    print(json.dumps(found))
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
