"""What Python may read and make inside the replica region, and what is refused by name."""

import copy
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from region_harness import Apply, Probe, X, exactly, run
from torch import nn

from spmdzero._user_line import user_line
from spmdzero.backend import Mesh, current
from spmdzero.errors import ReplicaRegionError
from tests.support.backends import installed

pytestmark = pytest.mark.backends("jax", "torch_xla")

Function = Callable[[torch.Tensor], torch.Tensor]
# name -> a function of a replica's rows, and what it makes of all rows
Works = dict[str, tuple[Function, torch.Tensor]]


def by_branch(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.isnan().any() else x + 2


def by_print(x: torch.Tensor) -> torch.Tensor:
    assert "1., 1." in repr(torch.ones(2, device=x.device))
    return x


READS: Works = {
    "item": (lambda x: x * (x > -1).sum().item(), X * 8),
    "float": (lambda x: x * float((x > -1).all()), X),
    "int": (lambda x: x * int((x > -1).sum()), X * 8),
    "bool": (by_branch, X + 2),
    "tolist": (lambda x: x + sum((x[0] * 0 + 3).tolist()), X + 12),
    "equal": (lambda x: x + 1 if torch.equal(x, x * 1) else x, X + 1),
    "not equal": (lambda x: x + 1 if torch.equal(x, x + 1) else x, X),
    "cpu": (lambda x: x + (x[:1] * 0 + 5).cpu().to(x.device), X + 5),
    "nan": (lambda x: x + 1 if (x.sum() * float("nan")).item() != 0 else x, X + 1),
    "repr": (by_print, X),
}


def integer_index(x: torch.Tensor) -> torch.Tensor:
    return x[:, torch.tensor([2, 0, 1, 3], device=x.device)]


INDICES: Works = {
    "masked_fill_": (
        lambda x: x.clone().masked_fill_(x > 30, 0.5),
        torch.where(X > 30, torch.full_like(X, 0.5), X),
    ),
    "integer index": (integer_index, integer_index(X)),
    "list index": (lambda x: x[:, [2, 0, 1, 3]], integer_index(X)),
    "topk": (lambda x: x.topk(4).values, X.flip(1)),
}
CONSTANTS: Works = {
    "torch.tensor of a scalar": (lambda x: x * torch.tensor(2.0, device=x.device), X * 2),
    "torch.tensor of a list": (
        lambda x: x + torch.tensor([1.0, 2, 3, 4], device=x.device),
        X + torch.arange(1.0, 5),
    ),
    "new_tensor": (lambda x: x + x.new_tensor([1.0, 2, 3, 4]), X + torch.arange(1.0, 5)),
    "arange": (lambda x: x + torch.arange(1.0, 5, device=x.device), X + torch.arange(1.0, 5)),
    "zeros, ones, full": (
        lambda x: x + torch.ones(2, 4, device=x.device) + x.new_full((4,), 3) + x.new_zeros(4),
        X + 4,
    ),
    "ones.tril": (
        lambda x: x + torch.ones(2, 4, device=x.device).tril(),
        X + torch.ones(2, 4).tril().repeat(8, 1),
    ),
    "a CPU tensor, .to(device)": (
        lambda x: x + torch.arange(4.0).to(x.device),
        X + torch.arange(4),
    ),
    "a CPU tensor, .to(tensor)": (lambda x: x + torch.arange(4).to(x), X + torch.arange(4)),
    "a CPU tensor that is not contiguous": (
        lambda x: x + torch.arange(8.0).reshape(4, 2).T.to(x.device),
        X + torch.arange(8.0).reshape(4, 2).T.repeat(8, 1),
    ),
    "a CPU scalar": (lambda x: x + torch.tensor(3.0), X + 3),
    "one_hot": (
        lambda x: x + F.one_hot(torch.arange(2, device=x.device), 4),
        X + torch.eye(4)[:2].repeat(8, 1),
    ),
}


def _written(tensor: torch.Tensor) -> torch.Tensor:
    """`[2, 4]`, zeros and nines, written through views of what a forward made."""
    view = tensor[:, 1:]
    tensor[0] = 0
    tensor[1].fill_(9)
    view[:, :2] = 9
    tensor[:, 3:] *= 0
    tensor[:, :1].zero_()
    return tensor


MADE: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "zeros": lambda device: torch.zeros(2, 4, device=device),
    "full": lambda device: torch.full((2, 4), 2.0, device=device),
    "empty": lambda device: torch.empty(2, 4, device=device),
    "arange": lambda device: torch.arange(8.0, device=device).view(2, 4),
    "rand": lambda device: torch.rand(2, 4, device=device),
    "randperm": lambda device: torch.randperm(8, device=device).view(2, 4).float(),
    "tensor": lambda device: torch.tensor([[1.0, 2, 3, 4]] * 2, device=device),
    "from the CPU": lambda device: torch.ones(2, 4).to(device),
    "eye": lambda device: torch.eye(2, 4, device=device),
}


def test_what_a_forward_may_read_index_and_make_works(mesh: Mesh) -> None:
    written = {
        f"written through views of {name}": (
            lambda x, make=make: 0 * x + _written(make(x.device)),
            _written(torch.ones(2, 4)).repeat(8, 1),
        )
        for name, make in MADE.items()
    }
    works = READS | INDICES | CONSTANTS | written
    probe = Probe(Apply(lambda x: {name: f(x) for name, (f, _) in works.items()}), mesh)
    with torch.no_grad():
        output = probe(probe.batch(X))
    for name, (_, expected) in works.items():
        assert torch.equal(output[name].cpu(), expected), name


# -- what is refused -----------------------------------------------------------------------

DISAGREES = r"the replicas disagree on it.*torch\.where"
DYNAMIC = r"depends on data.*Use torch\.where"
# The way out that a backend has; torch_xla is named where it is installed.
LACKING = (
    r'no lowering of aten.*"forward": "global"'
    if current().name == "torch_xla"
    else r"no entry in the JAX backend's table.*Write it with other operations"
    + (r'.*"backend": "torch_xla"' if installed("torch_xla") else "$")
)
REFUSED: dict[str, tuple[Function, str]] = {
    "item": (lambda x: x * x.sum().item(), DISAGREES),
    "float": (lambda x: x * float(x.mean()), DISAGREES),
    "bool": (lambda x: x if (x > 20).any() else x + 1, DISAGREES),
    "tolist": (lambda x: x * x[0].tolist()[0], DISAGREES),
    "equal": (lambda x: x + 1 if torch.equal(x, x.clamp(max=20)) else x, DISAGREES),
    "cpu": (lambda x: x + x.cpu().sum().to(x.device), DISAGREES),
    "nan on some replicas": (lambda x: x * (x - 20).sqrt().sum().item(), DISAGREES),
    "nonzero": (lambda x: x + x.nonzero().sum(), DYNAMIC),
    "boolean mask": (lambda x: x + x[x > 3].sum(), DYNAMIC),
    "masked_select": (lambda x: x + torch.masked_select(x, x > 3).sum(), DYNAMIC),
    "unique": (lambda x: x + torch.unique(x).sum(), DYNAMIC),
    "where with one argument": (lambda x: x + torch.where(x > 3)[0].sum(), DYNAMIC),
    "boolean mask of rows": (lambda x: x + x[x[:, 0] > 3].sum(), DYNAMIC),
    "masked assignment of many values": (lambda x: _assign(x, x[0, :2]), DYNAMIC),
    "bessel_j0": (lambda x: x + torch.special.bessel_j0(x), LACKING),
}
if current().name == "torch_xla":
    REFUSED |= {
        "fft": (lambda x: x + torch.fft.rfft(x).abs().sum(), LACKING),
        "median": (lambda x: x + x.median(), LACKING),
    }


def _assign(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x > 3] = value
    return x


def test_what_can_not_be_done_per_replica_is_refused_with_the_way_out(mesh: Mesh) -> None:
    for name, (function, says) in REFUSED.items():
        with pytest.raises(ReplicaRegionError) as caught:
            run(function, mesh, X)
        assert re.search(says, str(caught.value)), name
    # And the region works again after an error.
    exactly(run(lambda x: x * 2, mesh, X), X * 2)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 100:  # the line that the error names
            return x
        return x + 1


def test_a_disagreement_names_the_line_the_submodule_and_the_values(mesh: Mesh) -> None:
    module = nn.Sequential(nn.Identity(), nn.ModuleDict({"gate": Branching()})["gate"])
    with pytest.raises(ReplicaRegionError) as caught:
        run(lambda x: module(x), mesh, X)
    line = _line_of("# the line that the error names")
    assert str(caught.value).startswith(f"{Path(__file__)}:{line} ")

    probe = Probe(nn.Sequential(nn.Identity(), nn.Sequential(Branching())), mesh)
    with pytest.raises(ReplicaRegionError) as caught:
        probe(probe.batch(X))
    message = str(caught.value)
    assert message.startswith(f"{Path(__file__)}:{line} (in submodule '1.0'): ")
    values = re.search(r"disagree on it \((.*?)\)", message)
    assert values is not None
    assert values[1].split(", ").count("True") + values[1].split(", ").count("False") == 8


def test_a_read_by_pythons_own_library_names_the_line_that_called_it(mesh: Mesh) -> None:
    def copied(x: torch.Tensor) -> torch.Tensor:
        return copy.copy(x)  # the line that copies

    with pytest.raises(ReplicaRegionError) as caught:
        run(copied, mesh, X)
    assert str(caught.value).startswith(f"{Path(__file__)}:{_line_of('# the line that copies')} ")


def _line_of(comment: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(comment))


def test_a_backward_hook_that_reads_a_value_is_checked_too(mesh: Mesh) -> None:
    def hooked(x: torch.Tensor) -> torch.Tensor:
        y = x * probe.module.weight
        y.register_hook(lambda grad: grad * (1 if grad.sum() > 100 else 2))
        return y * x

    probe = Probe(Apply(hooked), mesh)
    loss = probe(probe.batch(X)).sum()
    with pytest.raises(ReplicaRegionError, match="the replicas disagree"):
        probe.backward(loss)


def test_a_padded_sequence_holds_its_parts(mesh: Mesh) -> None:
    # Made by torch's own C++ code, of a constant and views of it.
    def padded(x: torch.Tensor) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([x[0, :2], x[1]], batch_first=True)

    expected = torch.cat([padded(rows) for rows in X.split(2)])
    exactly(run(padded, mesh, X), expected)


def test_repr_shows_what_each_replica_has(mesh: Mesh) -> None:
    texts = []
    run(lambda x: texts.append(repr(x)) or x, mesh, X)
    first, *lines = texts[0].split("\n")
    assert first == (
        "tensor of 8 replicas, another on each (shape=[2, 4], dtype=torch.float32, device='xla:0'):"
    )
    shown = "\n".join(line.removeprefix("  ") for line in lines)
    assert shown == "\n".join(f"replica {i}: {rows!r}" for i, rows in enumerate(X.split(2)))


def test_a_constant_stays_out_of_the_gradient(mesh: Mesh) -> None:
    probe = Probe(Apply(lambda x: x), mesh)
    probe.module.forward = lambda x: (
        x * probe.module.weight * torch.tensor([2.0, 0, 0, 0], device=x.device)
    ).sum()
    probe.backward(probe(probe.batch(X)))
    exactly(probe.gradients["weight"], 2 * X[:, 0].sum() / 8)


def test_naming_the_place_of_a_read_keeps_nothing_of_the_script_alive() -> None:
    class Batch:
        pass

    batch = Batch()
    alive = weakref.ref(batch)
    assert "test_region_reads.py" in user_line(nn.Identity())
    del batch
    assert alive() is None
