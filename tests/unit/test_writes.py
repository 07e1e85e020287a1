"""What is written in place, through views and by indices, beside torch on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from region_harness import ROWS, Apply, Probe

from spmdzero.backend import Mesh, current, runtime
from spmdzero.errors import SpmdZeroRuntimeError
from tests.support.writes import (
    COMPOSITES,
    GRADIENTS,
    IN_PLACE,
    PUTS,
    REFUSED,
    gradient,
    on_the_cpu,
    whole,
)

pytestmark = pytest.mark.backends("jax", "torch_xla")

ON_JAX = current().name == "jax"
# What torch_xla refuses, with its words.
WORDS = {
    "as_strided_": "would lose what is written after as_strided_",
    "as real parts": "abs does not support automatic differentiation",
}
# What torch_xla computes otherwise outside of a forward, and says nothing: docs/two_backends.md.
OTHERWISE = {
    "unfold",
    "conj, resolved",
    "a part of the storage, then turned",
    "out= of integers",
    "expanded",
}


def here(names: Any) -> list[Any]:
    """The names to be tried on this backend."""
    return [name for name in names if ON_JAX or name not in OTHERWISE]


def put(name: str, device: torch.device | str) -> torch.Tensor:
    """The tensor of a row of PUTS once it is written."""

    def moved(given: Any) -> Any:
        return given.to(device) if isinstance(given, torch.Tensor) else given

    shape, index, value = PUTS[name]
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(device)
    x[tuple(map(moved, index))] = moved(value)
    return x


@pytest.mark.parametrize("name", PUTS)
def test_what_is_written_by_masks_and_indices_is_torchs(mesh: Mesh, name: str) -> None:
    assert torch.equal(put(name, runtime.device()).cpu(), put(name, "cpu"))


def form(made: object) -> object:
    if isinstance(made, torch.Tensor):
        # torch_xla's tensors have no strides.
        return made.shape, made.stride() if ON_JAX else None, made.dtype
    return [form(item) for item in made] if isinstance(made, list | tuple) else made


@pytest.mark.parametrize("name", here(IN_PLACE))
def test_what_is_written_in_place_is_torchs(mesh: Mesh, name: str) -> None:
    plain = torch.arange(24.0).reshape(1, 4, 6)
    if name in WORDS and not ON_JAX:
        with pytest.raises(SpmdZeroRuntimeError, match=WORDS[name]):
            IN_PLACE[name](plain.to(runtime.device()))
        return
    theirs, ours = IN_PLACE[name](plain), IN_PLACE[name](plain.to(runtime.device()))
    torch.testing.assert_close(on_the_cpu(ours), on_the_cpu(theirs), rtol=0, atol=0)
    assert form(ours) == form(theirs)


@pytest.mark.parametrize("name", here(REFUSED))
def test_what_torch_refuses_to_write_is_refused(mesh: Mesh, name: str) -> None:
    plain = whole(1, 2, 3, 4)
    with pytest.raises(RuntimeError):
        REFUSED[name](plain)
    ours = plain.to(runtime.device())
    with pytest.raises((RuntimeError, SpmdZeroRuntimeError)) as caught:
        REFUSED[name](ours)
    assert "please report" not in str(caught.value)
    assert torch.equal(ours.cpu(), whole(1, 2, 3, 4))


@pytest.mark.parametrize("name", here(GRADIENTS))
def test_gradients_of_what_was_written_are_torchs(mesh: Mesh, name: str) -> None:
    plain = torch.arange(12.0).reshape(3, 4)
    if name in WORDS and not ON_JAX:
        with pytest.raises(RuntimeError, match=WORDS[name]):
            gradient(GRADIENTS[name], plain.to(runtime.device()))
        return
    ours = gradient(GRADIENTS[name], plain.to(runtime.device())).cpu()
    # Sums of up to twelve float32 products in another order.
    torch.testing.assert_close(ours, gradient(GRADIENTS[name], plain), rtol=1e-6, atol=1e-6)


def test_a_saved_tensor_that_a_list_operation_changed_is_noticed(mesh: Mesh) -> None:
    for device in ("cpu", runtime.device()):
        x = torch.ones(3, device=device, requires_grad=True)
        y = x * 1
        squared = y * y
        torch._foreach_add_([y], 1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squared.sum().backward()


@pytest.mark.parametrize("name", COMPOSITES)
def test_what_torch_makes_of_others_is_torchs(mesh: Mesh, name: str) -> None:
    plain = torch.arange(32.0)
    ours = on_the_cpu(COMPOSITES[name](plain.to(runtime.device())))
    # A transform of eight numbers up to 32, in float32.
    torch.testing.assert_close(ours, on_the_cpu(COMPOSITES[name](plain)), rtol=1e-5, atol=1e-4)


def diagonals(x: torch.Tensor) -> list[torch.Tensor]:
    """Diagonals of each two dims, the tensors of which they are written, and their gradients."""
    made = []
    for dims in ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1), (-3, 1), (-1, -2)):
        # Those of -3 and 3 have no elements.
        for offset in (-3, -1, 0, 1, 3):
            trained = x.clone().requires_grad_()
            base = trained * 1
            diagonal = base.diagonal(offset, *dims)
            diagonal.mul_(diagonal.detach().clone())
            (base * base).sum().backward()
            made += [diagonal, base, trained.grad]
    return made


def test_diagonals_of_any_two_dims_are_torchs(mesh: Mesh) -> None:
    plain = torch.arange(24.0).reshape(2, 3, 4)
    torch.testing.assert_close(
        on_the_cpu(diagonals(plain.to(runtime.device()))),
        on_the_cpu(diagonals(plain)),
        rtol=0,
        atol=0,
    )


def test_a_range_of_integers_whose_step_is_cut_to_nothing_is_refused(mesh: Mesh) -> None:
    # Of 64 bits torch itself ends the process by a division by 0.
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(RuntimeError, match=r"cut its step of 0\.5 to 0"):
            torch.arange(0.5, 3.5, 0.5, dtype=dtype, device=runtime.device())
    there = torch.arange(1, 9, 2.5, dtype=torch.int32, device=runtime.device())
    assert torch.equal(there.cpu(), torch.arange(1, 9, 2.5, dtype=torch.int32))


def test_nothing_is_rolled(mesh: Mesh) -> None:
    nothing = torch.ones(3, 0, device=runtime.device())
    assert nothing.roll(1, 1).cpu().shape == (3, 0)


# -- in a forward ----------------------------------------------------------------------------


def in_region(functions: dict[str, Callable[[torch.Tensor], Any]], mesh: Mesh) -> dict[str, Any]:
    """What each function of a tensor on the devices returns in the region, in one pass."""
    found: dict[str, Any] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        for name, function in functions.items():
            try:
                found[name] = on_the_cpu(function(x))
            except RuntimeError as error:
                found[name] = error
        return x.sum()

    probe = Probe(Apply(forward), mesh)
    with torch.no_grad():
        probe(probe.batch(torch.zeros(ROWS, 1)))
    return found


def outcome(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    try:
        return on_the_cpu(function(x))
    except RuntimeError as error:
        return error


def aliased(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    """What `call` makes of a tensor once that is written, and the tensor."""

    def both(x: torch.Tensor) -> Any:
        base = torch.arange(24.0, device=x.device).reshape(2, 3, 4)
        made = call(base)
        made.add_(100)
        return made, base

    return both


# Some are copies in torch, into which one may write, and some are views.
RESHAPED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned, reshaped": lambda x: x.transpose(1, 2).reshape(2, 12),
    "turned, as another": lambda x: x.transpose(1, 2).reshape_as(x),
    "turned, torch.reshape": lambda x: torch.reshape(x.permute(2, 0, 1), (4, 6)),
    "turned, flat": lambda x: x.transpose(1, 2).flatten(),
    "turned, flat from a dim": lambda x: x.transpose(0, 1).flatten(1),
    "turned, raveled": lambda x: x.mT.ravel(),
    "turned, contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "turned twice": lambda x: x.transpose(1, 2).transpose(1, 2).reshape(-1),
    "columns": lambda x: x[:, :, ::2].reshape(-1),
    "a column": lambda x: x[..., 1].contiguous(),
    "rows": lambda x: x[1:].reshape(-1),
    "a row": lambda x: x[1, 1].contiguous(),
    "as it is": lambda x: x.contiguous(),
    "turned dims of one": lambda x: x[:1].transpose(0, 1).reshape(-1),
    "a part of dims": lambda x: x.transpose(0, 1).reshape(3, 2, 2, 2),
}


def test_what_a_forward_reshapes_is_a_view_where_it_is_torchs(mesh: Mesh) -> None:
    functions = {name: aliased(call) for name, call in RESHAPED.items()}
    found = in_region(functions, mesh)
    wrong = [n for n, f in functions.items() if not _same(found[n], outcome(f, torch.zeros(1)))]
    assert not wrong


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, Exception):
        return isinstance(ours, RuntimeError)
    if isinstance(ours, Exception) or isinstance(theirs, torch.Tensor):
        return isinstance(ours, torch.Tensor) and torch.equal(ours, theirs)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.backends("torch_xla")
def test_writes_that_torch_xla_does_wrongly_are_refused_in_a_forward(mesh: Mesh) -> None:
    writes: dict[str, Callable[[torch.Tensor], Any]] = {
        "expanded": lambda x: x.expand(3, 2, 4)[0].add_(1),
        "expanded, in a list": lambda x: torch._foreach_mul_([x.expand(3, 2, 4)], 2),
        "expanded, as out": lambda x: torch.mul(x, 2, out=x.expand(2, 2, 4)[0]),
    }
    found = in_region({n: lambda x, f=f: f(x.new_ones(2, 4)) for n, f in writes.items()}, mesh)
    for name, error in found.items():
        assert "expand or unfold returned, which torch_xla can't. Write into a clone" in str(error)
        assert isinstance(error, SpmdZeroRuntimeError), name


def test_an_expanded_tensor_that_only_has_more_dims_is_written(mesh: Mesh) -> None:
    for dtype in (torch.int32, torch.float32):
        written = torch.ones(2, 3, dtype=dtype, device=runtime.device())
        written.expand(1, 2, -1).add_(1)
        assert torch.equal(written.cpu(), torch.full((2, 3), 2, dtype=dtype))


def test_what_squeeze_leaves_as_it_is_is_written(mesh: Mesh) -> None:
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.squeeze(),
        lambda x: x.squeeze(-1),
        lambda x: x.squeeze((0, 1)),
        lambda x: x.squeeze_(),
        lambda x: x.squeeze_(0),
        lambda x: x.squeeze_((0, 1)),
    ]
    new = torch.arange(6.0).reshape(2, 3)
    for call in calls:
        x = torch.ones(2, 3, device=runtime.device()) * 1
        squeezed = call(x)
        # Nothing else holds what is uploaded.
        squeezed.copy_(new.to(runtime.device()))
        runtime.sync()
        assert torch.equal(x.cpu(), new)
        assert torch.equal(squeezed.cpu(), new)
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.squeeze(2)


def test_what_torch_refuses_to_write_is_refused_in_a_forward(mesh: Mesh) -> None:
    kept = {name: lambda x, f=f: f(x.new_ones(4, dtype=torch.long)) for name, f in REFUSED.items()}
    found = in_region(kept, mesh)
    assert [name for name in REFUSED if not isinstance(found[name], RuntimeError)] == []
