"""What a host holds of a job that no machine here could run: plan, checkpoint, signs of life.

    python tests/benchmarks/on_paper.py --hosts 1024 --devices-per-host 4 --billions 100

The plan is made for a Llama of so many parameters; what each host would save is worked out by the
code that saves, and lies in sparse files, whose tensors have no bytes on the disk. Then one host
opens the checkpoint. All hosts' signs of life go through one store, as they do twice a second.
Each part is measured in a process of its own, so that its peak is its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmdzero.backend.hosts._watch import ALIVE, VERDICT, Sign, Watch
from spmdzero.formats import HostState
from spmdzero.formats._boxes import Box
from spmdzero.formats._files import checksum, write_whole
from spmdzero.formats._tensor_file import Entry, _header
from spmdzero.formats.native._contents import Contents, FileEntry, Piece, TensorEntry
from spmdzero.formats.native._host_file import write_host
from spmdzero.formats.native._manifest import COMMIT, Manifest, commit_line
from spmdzero.formats.native._read import read_native
from spmdzero.plan import MeshSpec, ParamSpec, ShardingPlan, choose_placement
from spmdzero.state._live_state import device_boxes

TAG, NONCE = "global_step1", "00000000"
SLOTS = ("exp_avg", "exp_avg_sq")


def llama(billions: float) -> list[ParamSpec]:
    """The parameters of a Llama whose blocks are 10,240 wide, as many as come to the size."""
    width, inner, vocabulary = 10_240, 28_672, 32_000
    block = {f"attention.{name}": (width, width) for name in "qkvo"}
    block |= {"mlp.gate": (inner, width), "mlp.up": (inner, width), "mlp.down": (width, inner)}
    block |= {"norm1": (width,), "norm2": (width,)}
    size = 4 * width**2 + 3 * width * inner + 2 * width
    layers = round((billions * 1e9 - 2 * vocabulary * width) / size)
    shapes = {"embed": (vocabulary, width), "head": (vocabulary, width), "norm": (width,)}
    shapes |= {f"layers.{n}.{name}": shape for n in range(layers) for name, shape in block.items()}
    return [
        ParamSpec(name=f"{name}.weight", shape=shape, dtype="bfloat16", trainable=True)
        for name, shape in shapes.items()
    ]


def plan_of(args: argparse.Namespace) -> ShardingPlan:
    """Stage 2 over all devices: bf16 parameters, fp32 master weights, AdamW."""
    devices = args.hosts * args.devices_per_host
    data = devices // (args.fsdp or devices)
    axes = (("fsdp", devices),) if data == 1 else (("data", data), ("fsdp", args.fsdp))
    return ShardingPlan.build(
        llama(args.billions), stage=2, mesh=MeshSpec(axes), master=True, moments=SLOTS,
        accumulator_dtype=None, accumulation_steps=1,
    )  # fmt: skip


class Saved:
    """What each host would save."""

    def __init__(self, plan: ShardingPlan, *, hosts: int) -> None:
        self._plan, self._hosts = plan, hosts
        self._boxes: dict[tuple[int, ...], list[tuple[Box, ...]]] = {}

    def tensors(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Name -> shape and dtype, as `held_tensors` names them."""
        import torch

        found: dict[str, tuple[tuple[int, ...], Any]] = {}
        for tensor in self._plan:
            found[f"parameter/{tensor.name}"] = tensor.shape, torch.bfloat16
            for slot in ("master", *SLOTS):
                found[f"{slot}/{tensor.name}"] = tensor.shape, torch.float32
        return found

    def of_host(self, host: int, shape: tuple[int, ...], turn: int) -> list[Box]:
        """The parts of a tensor that a host saves: of copies along `data` the first."""
        boxes = self._boxes_of(shape)
        if len(boxes) == 1:
            return list(boxes[0]) if turn % self._hosts == host else []
        each = self._plan.mesh.size // self._hosts
        return [box for part in boxes[host * each : (host + 1) * each] for box in part]

    def _boxes_of(self, shape: tuple[int, ...]) -> list[tuple[Box, ...]]:
        if shape not in self._boxes:
            mesh = self._plan.mesh
            placement = choose_placement(
                shape, mesh=mesh, min_shard_elements=self._plan.min_shard_elements
            )
            slices = placement.owned_slices(shape, mesh)
            # The first copy of each shard is the first row of the mesh.
            kept = slices[: mesh.fsdp] if placement.is_sharded else slices[:1]
            self._boxes[shape] = list(device_boxes(shape, placement, list(kept)))
        return self._boxes[shape]

    def part(self, host: int, folder: Path) -> Contents:
        """A host's part, as `_write_part` makes it, in a file whose tensors have no bytes."""
        place = f"{NONCE}-{host:05}-of-{self._hosts:05}"
        tensors = self.tensors()
        entries, owners = [], []
        for turn, (name, (shape, dtype)) in enumerate(tensors.items()):
            for index, box in enumerate(self.of_host(host, shape, turn)):
                entries.append(Entry(key=f"{name}@{index}", box=box, dtype=dtype, read=_unread))
                owners.append(name)
        header = _header(entries, {"format": "pt", "tag": TAG})
        file, offset = folder / f"tensors-{place}.safetensors", len(header)
        pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
        for entry, owner in zip(entries, owners, strict=True):
            pieces[owner].append(Piece(file.name, offset, entry.box, "0" * 32))
            offset += entry.size
        with file.open("wb") as opened:
            opened.write(header)
            opened.truncate(offset)
        state = folder / f"state-{place}.pt"
        size, digest = write_host(HostState(counters={"global_steps": 1}), state)
        return Contents(
            states=(state.name,),
            files={
                file.name: FileEntry(size=offset, checksum=checksum(header), checked=len(header)),
                state.name: FileEntry(size=size, checksum=digest, checked=size),
            },
            tensors={
                name: TensorEntry(shape=shape, dtype=dtype, pieces=tuple(pieces[name]))
                for name, (shape, dtype) in tensors.items()
            },
        )


def _unread(box: Box) -> Any:
    raise AssertionError(f"{box} is on paper only")


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """The plan alone."""
    made = plan_of(args)
    parameters = sum(_elements(tensor.shape) for tensor in made)
    return {"tensors": len(made), "parameters": parameters, "of a device": made.memory().total}


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def save(args: argparse.Namespace) -> dict[str, Any]:
    """What the first host does when all have written: it joins their tables."""
    folder = Path(args.folder) / TAG
    folder.mkdir(parents=True, exist_ok=True)
    saved = Saved(plan_of(args), hosts=args.hosts)
    contents = Contents.joined([saved.part(host, folder) for host in range(args.hosts)])
    manifest = Manifest(
        tag=TAG, nonce=NONCE, saved_at=0.0, latest=False, description={}, contents=contents
    )
    data = manifest.to_json()
    write_whole(folder / manifest.name, data)
    write_whole(folder / COMMIT, commit_line(manifest, data))
    pieces = sum(len(tensor.pieces) for tensor in contents.tensors.values())
    on_disk = sum(entry.size for entry in contents.files.values())
    return {"pieces": pieces, "manifest": len(data), "tensors' bytes": on_disk}


def load(args: argparse.Namespace) -> dict[str, Any]:
    """What each host does first when it resumes."""
    state = read_native(Path(args.folder) / TAG, process=args.hosts - 1)
    return {"tensors": len(state.tensors)}


def watch(args: argparse.Namespace) -> dict[str, Any]:
    """One sign of life of each host, and what it reads of others."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for key in (VERDICT, *(f"host/{rank}" for rank in range(args.hosts))):
        store.set(key, Sign(ALIVE).to_json())
    names = [f"host-{rank}" for rank in range(args.hosts)]
    watches = [Watch(store, rank=rank, names=names) for rank in range(args.hosts)]
    start = time.perf_counter()
    for each in watches:
        each.beat()
    return {"of all hosts": round(time.perf_counter() - start, 2)}


PARTS = {"watch": watch, "plan": plan, "save": save, "load": load}


def measured(args: argparse.Namespace) -> None:
    """One part, in this process; prints what it took as JSON."""
    before, start = _peak(), time.perf_counter()
    found = PARTS[args.part](args)
    seconds = round(time.perf_counter() - start, 2)
    print(json.dumps({**found, "seconds": seconds, "MiB": round((_peak() - before) / 2**10)}))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=1024)
    parser.add_argument("--devices-per-host", type=int, default=4)
    parser.add_argument("--billions", type=float, default=100.0)
    parser.add_argument("--fsdp", type=int, help="devices that share a state; the rest have copies")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        measured(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--folder", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{part}: status {done.returncode}\n{done.stderr[-2000:]}")
            print(part, done.stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
