"""Writes into parameters inside the replica region: what is refused, and what is written once."""

from collections.abc import Callable

import pytest
import torch
from region_harness import ROWS, Probe, assert_same_sums, exactly, numbers
from torch import nn
from torch.utils.checkpoint import checkpoint

from spmdzero.backend import Mesh, arrays, runtime
from spmdzero.errors import ReplicaRegionError

pytestmark = pytest.mark.backends("jax", "torch_xla")


class Writer(nn.Module):
    """Calls `write(self, x)` and returns a number that depends on its weights."""

    def __init__(self, write: Callable[..., object], *, checkpointed: bool = False) -> None:
        super().__init__()
        self.write, self.checkpointed = write, checkpointed
        self.weight = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.inner = nn.Linear(3, 3)
        self.copy = nn.Linear(3, 3).requires_grad_(requires_grad=False)
        self.kept = [self.frozen]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, x)
        return (self.inner(x) * self.weight).mean()


def _replaced(module: Writer, x: torch.Tensor) -> None:
    module.weight = nn.Parameter(x.mean(0).detach())


def _recorded(module: Writer, x: torch.Tensor) -> None:
    module.weight.mul_(0.5)


@torch.no_grad()
def _other_shape(module: Writer, x: torch.Tensor) -> None:
    module.frozen.data = x.mean(0)[:2]


def _other_shape_of_a_buffer(module: Writer, x: torch.Tensor) -> None:
    module.count = torch.ones(2, dtype=torch.int64, device=x.device)


def _digits_lost(module: Writer, x: torch.Tensor) -> None:
    module.count = module.count * 0.5


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (_replaced, r"another tensor in the place of the parameter 'weight'"),
        (_recorded, r"parameter 'weight' in place while autograd records it.*torch\.no_grad\(\)"),
        (_other_shape_of_a_buffer, r"buffer 'count' the shape \[2\]\. It had \[\]"),
        (_digits_lost, r"torch\.float32 into the buffer 'count', which is torch\.int64"),
    ],
)
def test_a_write_that_cannot_be_kept_is_refused_by_name_and_line(
    mesh: Mesh, write: Callable[..., object], what: str
) -> None:
    probe = Probe(Writer(write), mesh)
    with pytest.raises(ReplicaRegionError, match=what) as raised:
        probe(probe.batch(numbers(ROWS, 3)))
    assert "test_region_writes.py:" in str(raised.value)


def test_data_of_another_shape_is_refused(mesh: Mesh) -> None:
    probe = Probe(Writer(_other_shape), mesh)
    # JAX's backend refuses it where it is assigned.
    what = r"'frozen' the shape \[2\]\. It had \[3\]|data of \[3\] .* is assigned \[2\]"
    with pytest.raises(RuntimeError, match=what):
        probe(probe.batch(numbers(ROWS, 3)))


# Each writes into what is kept of a parameter or a buffer: the tensor, or what `.data` gave.
KEPT_WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda kept: kept.mul_(2),
    "copy_": lambda kept: kept.copy_(torch.full_like(kept, 2)),
    "a part": lambda kept: kept.reshape(-1)[:1].copy_(torch.ones_like(kept.reshape(-1)[:1])),
    "foreach": lambda kept: torch._foreach_add_([kept], 1),
    "foreach_copy": lambda kept: torch._foreach_copy_([kept], [torch.full_like(kept, 2)]),
    "its data": lambda kept: setattr(kept, "data", kept.detach() + 1),
}


@pytest.mark.parametrize("name", ["frozen", "count"])
@pytest.mark.parametrize(
    ("way", "data"),
    # What is assigned to the `.data` of what `.data` gave is no write into the tensor.
    [(way, data) for way in KEPT_WRITES for data in (False, True) if way != "its data" or not data],
)
def test_a_write_by_a_reference_from_before_is_refused_by_name(
    mesh: Mesh, way: str, name: str, data: bool
) -> None:
    @torch.no_grad()
    def write(module: Writer, x: torch.Tensor) -> None:
        KEPT_WRITES[way](kept[0])

    kept: list[torch.Tensor] = []
    probe = Probe(Writer(write), mesh)
    own = getattr(probe.module, name)
    kept.append(own.data if data else own)
    with pytest.raises(ReplicaRegionError, match=rf"'{name}' by a reference .*self\.{name}"):
        probe(probe.batch(numbers(ROWS, 3)))


def test_a_written_parameter_is_its_replicas_mean_and_the_same_object(mesh: Mesh) -> None:
    @torch.no_grad()
    def write(module: Writer, x: torch.Tensor) -> None:
        module.frozen.copy_(x.sum(0))
        module.weight.data = x.sum(0) * 2

    probe = Probe(Writer(write), mesh)
    before = dict(probe.module.named_parameters())
    # Small whole numbers, whose sums and whose mean over eight are exact.
    x = torch.arange(ROWS * 3.0).reshape(ROWS, 3)
    probe.backward(probe(probe.batch(x)))
    expected = x.reshape(8, 2, 3).sum(1).mean(0)
    exactly(probe.module.frozen.detach().cpu(), expected)
    exactly(probe.module.weight.detach().cpu(), expected * 2)
    assert all(before[name] is p for name, p in probe.module.named_parameters())
    assert not any(arrays.is_split(p) for p in probe.module.parameters())
    assert probe.module.weight.requires_grad
    assert probe.gradients["weight"].abs().max() > 0


def test_a_module_loaded_in_forward_is_written(mesh: Mesh) -> None:
    probe = Probe(Writer(lambda m, x: m.copy.load_state_dict(m.inner.state_dict())), mesh)
    probe(probe.batch(numbers(ROWS, 3)))
    # The sum of eight equal numbers is rounded.
    assert_same_sums(probe.module.copy.weight, probe.module.inner.weight.detach().cpu())


@torch.no_grad()
def _counts(module: Writer, x: torch.Tensor) -> None:
    module.count += 1
    module.frozen.data = module.frozen.data + 1
    module.frozen.mul_(2)


def test_what_a_checkpointed_block_writes_is_written_once(mesh: Mesh) -> None:
    # Plain torch writes it a second time when backward runs the block again.
    probe = Probe(Writer(_counts, checkpointed=True), mesh)
    for number in range(1, 3):
        probe.backward(probe(probe.batch(numbers(ROWS, 3))))
        assert probe.buffers["count"].item() == number
    exactly(probe.module.frozen.cpu(), torch.full((3,), 10.0))


def test_a_forward_without_gradients_writes_too(mesh: Mesh) -> None:
    probe = Probe(Writer(_counts), mesh)
    probe.module.eval()
    with torch.no_grad():
        probe(probe.batch(numbers(ROWS, 3)))
    runtime.sync()
    assert probe.buffers["count"].item() == 1
    exactly(probe.module.frozen.cpu(), torch.full((3,), 4.0))


def test_an_integer_parameter_that_disagrees_is_found_and_named(mesh: Mesh) -> None:
    @torch.no_grad()
    def write(module: Writer, x: torch.Tensor) -> None:
        module.seen.add_((x > 0).sum())

    module = Writer(write)
    module.seen = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
    probe = Probe(module, mesh)
    probe(probe.batch(torch.arange(ROWS * 3.0).reshape(ROWS, 3) - 20))
    with pytest.raises(ReplicaRegionError, match=r"seen.*differs between replicas"):
        probe.region.check_agreement()


def test_a_parameter_that_is_only_read_is_not_sent(mesh: Mesh) -> None:
    probe = Probe(Writer(lambda module, x: None), mesh)
    before = {name: arrays.write_stamp(p) for name, p in probe.module.named_parameters()}
    probe.backward(probe(probe.batch(numbers(ROWS, 3))))
    assert before == {name: arrays.write_stamp(p) for name, p in probe.module.named_parameters()}
