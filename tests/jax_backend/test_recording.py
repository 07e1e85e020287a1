"""What is refused at the user's line when it is recorded; `as_strided`, which sees storages."""

import sys
from collections.abc import Callable

import jax
import pytest
import torch
from jax.extend.core import Primitive

from spmdzero.backend import Mesh, current
from spmdzero.backend.jax.graph._operations import AtenOp
from spmdzero.errors import SpmdZeroRuntimeError
from spmdzero.plan import MeshSpec
from tests.support.bounds import rounded

DEVICE = torch.device("xla", 0)
Function = Callable[[torch.Tensor], torch.Tensor]


def written(x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    view.mul_(-1)
    return x


def gradient(x: torch.Tensor, function: Function) -> torch.Tensor:
    x = x.clone().requires_grad_()
    function(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


# name -> what it makes of 24 numbers of shape [4, 6].
STRIDED: dict[str, Function] = {
    "of a transposed view": lambda x: x.t().as_strided((3, 2), (6, 2), 1),
    "of a part": lambda x: x[1:].as_strided((3, 2), (6, 2)),
    "of a part of a part": lambda x: x[1:][1:, 2:].as_strided((2, 2), (1, 6)),
    "of a transposed result": lambda x: (x.t() + 1).as_strided((3, 2), (6, 2), 1),
    "of an expanded view": lambda x: x.expand(2, 4, 6).as_strided((2, 2), (6, 1), 3),
    "written": lambda x: written(x := x.clone(), x.t().as_strided((2, 2), (1, 6), 7)),
    "written, transposed": lambda x: written(x := x.t() + 0, x.as_strided((2, 2), (1, 6), 7)),
    "of another dtype": lambda x: x.view(torch.int32).as_strided((3, 2), (6, 2), 1),
    "of a smaller dtype": lambda x: x.view(torch.int16).as_strided((3, 2), (6, 2), 1),
    "of a larger dtype": lambda x: x.view(torch.float64).as_strided((3, 2), (3, 1), 1),
    "of real parts": lambda x: torch.view_as_real(torch.complex(x, -x)).as_strided((9,), (3,), 1),
    "of complex pairs": lambda x: torch.view_as_complex(x.view(-1, 2)).as_strided((5,), (2,), 1),
    "of what is conjugated": lambda x: torch.complex(x, -x).conj().as_strided((5,), (2,), 1),
    "written as another dtype": lambda x: written(
        x := x.clone(), x.view(torch.int32).as_strided((2, 2), (6, 1), 1)
    ),
    "written as real parts": lambda x: written(
        x := torch.complex(x, -x), torch.view_as_real(x).as_strided((9,), (3,), 1)
    ),
    "copied": lambda x: torch.as_strided_copy(x.t() + 0, (2, 2), (1, 6), 7),
    "scattered": lambda x: torch.as_strided_scatter(
        x.t() + 0, torch.ones(2, 2, device=x.device), (2, 2), (1, 6), 7
    ),
    "its gradient": lambda x: gradient(x, lambda x: x.t().as_strided((3, 5), (4, 1))),
    "its gradient, transposed": lambda x: gradient(
        x, lambda x: (x.t() * 2).as_strided((3, 5), (4, 1))
    ),
    "a write's gradient": lambda x: gradient(
        x, lambda x: written(x := x.t() * 2, x.as_strided((2, 2), (6, 1), 1))
    ),
}


@pytest.mark.parametrize("name", STRIDED)
def test_as_strided_is_torchs(mesh: Mesh, name: str) -> None:
    plain = torch.arange(24.0).reshape(4, 6)
    ours, theirs = STRIDED[name](plain.to(DEVICE)), STRIDED[name](plain)
    assert torch.equal(ours.detach().cpu(), theirs.detach())


def test_a_part_of_a_part_knows_where_it_begins(mesh: Mesh) -> None:
    part = torch.zeros(4, 6, device=DEVICE)[1:, 1:][1:, 2:]
    assert part.storage_offset() == torch.zeros(4, 6)[1:, 1:][1:, 2:].storage_offset()


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "LU": (
        lambda: torch.linalg.lu(torch.ones(2, 2, device=DEVICE), pivot=False)[1],
        "aten.linalg_lu.default can't be computed .* no LU without pivots. Leave out pivot=False",
    ),
    "beyond the storage": (
        lambda: torch.ones(4, device=DEVICE).as_strided((2,), (4,)),
        "as_strided asks for element number 4 of a storage of 4",
    ),
    "a storage with gaps": (
        lambda: torch.empty_strided((2, 2), (5, 1), device=DEVICE).as_strided((2,), (1,)),
        "as_strided of a tensor whose storage has other elements too",
    ),
    "half precision": (
        lambda: torch.linalg.qr(torch.ones(2, 2, device=DEVICE, dtype=torch.bfloat16))[0],
        "aten.linalg_qr.default can't .* none for bfloat16. Cast to torch.float32 first",
    ),
    "more memory": (
        lambda: torch.ones(1, 2, device=DEVICE).resize_(3),
        r"resize_ to \[3\] asks for more memory than a tensor of shape \[1, 2\]",
    ),
    "a program's input on the CPU": (
        lambda: current().mesh(MeshSpec((("fsdp", 8),))).enter(torch.ones(2), (None,)),
        r"a program on the devices is given a tensor on the CPU, \[2\] torch.float32. Move it",
    ),
    "a product of two dtypes": (
        lambda: torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2, device=DEVICE).bfloat16(),
        "aten.mm.default takes tensors of different dtypes, bfloat16 and float32. Cast the input",
    ),
    "a dtype": (
        lambda: torch.ones(2, device=DEVICE, dtype=torch.complex32),
        "can't be computed by the JAX backend: JAX has no dtype for torch.complex32",
    ),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", REFUSED)
def test_what_jax_cannot_trace_is_refused_where_it_is_recorded(mesh: Mesh, name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(SpmdZeroRuntimeError, match=said) as caught:
        function()
    assert "test_recording.py" in str(caught.value)


def test_an_operation_of_a_list_is_that_of_each(mesh: Mesh) -> None:
    tensors = [torch.full((2,), float(n), device=DEVICE) for n in range(3)]
    torch._foreach_mul_(tensors, 2.0)
    norms = torch._foreach_norm(torch._foreach_add(tensors, tensors))
    assert [norm.item() for norm in norms] == rounded([0.0, 32**0.5, 128**0.5])


def test_memory_is_refused_without_a_look_for_torch_xla(mesh: Mesh) -> None:
    # torch imports it for a tensor on such a device, and then JAX is refused.
    for take in (torch.from_dlpack, torch.Tensor.storage):
        with pytest.raises(RuntimeError, match=r"which has no memory here. Use \.cpu\(\)"):
            take(torch.ones(2, device=DEVICE))
    assert sys.modules.get("torch_xla") is None
    assert not torch.ops.aten.is_pinned(torch.ones(2, device=DEVICE))


def test_tensors_share_storage_where_they_share_values(mesh: Mesh) -> None:
    one, other = torch.ones(2, 3, device=DEVICE), torch.ones(2, 3, device=DEVICE)
    storage = one.untyped_storage()
    assert storage.nbytes() == 24
    assert one.data_ptr() == storage.data_ptr() == one.detach().data_ptr()
    assert one[1].data_ptr() == storage.data_ptr() + 12
    assert one[1].untyped_storage() == storage != other.untyped_storage()
    assert other.data_ptr() != one.data_ptr() != one.clone().data_ptr()
    with pytest.raises(AttributeError, match=r"resize_, of a tensor .* no memory here. Use .cpu"):
        storage.resize_(0)


def test_what_jax_lowers_too_late_names_the_line_and_spoils_no_other_value(mesh: Mesh) -> None:
    op = AtenOp.of(torch.ops.aten.sinc.default)
    assert op is not None
    own = op.function
    # JAX finds out when it is lowered, not when it is traced.
    late = Primitive("late")
    late.def_abstract_eval(lambda array: jax.core.ShapedArray(array.shape, array.dtype))
    object.__setattr__(op, "function", late.bind)
    try:
        failing = torch.sinc(torch.ones(2, 7, device=DEVICE))
        later, sound = failing + 1, torch.ones(3, device=DEVICE) * 2
        for read in (failing, later, failing):
            with pytest.raises(SpmdZeroRuntimeError, match=r"test_recording.py:\d+: aten.sinc"):
                read.cpu()
            assert torch.equal(sound.cpu(), torch.full((3,), 2.0))
            assert torch.equal((sound + 1).cpu(), torch.full((3,), 3.0))
    finally:
        object.__setattr__(op, "function", own)


def test_in_inference_mode_what_views_a_tensor_is_of_its_kind_as_in_torch(mesh: Mesh) -> None:
    for device in ("cpu", "xla"):
        made = torch.ones(2, 3, device=device)
        with torch.inference_mode():
            computed = made * 2
            views = [made.detach(), made.view(-1), made.t(), computed.detach(), computed.t()]
        assert [view.is_inference() for view in views] == [False] * 3 + [True] * 2, device
        assert torch.equal(views[-1].cpu(), torch.full((3, 2), 2.0))


def test_in_inference_mode_a_write_reaches_what_it_reaches_outside(mesh: Mesh) -> None:
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.narrow(1, 0, 1),
        lambda x: x.reshape(3, 2),
        lambda x: x.t().reshape(-1),
        lambda x: x.contiguous(),
        lambda x: x.chunk(2, 1)[1],
        lambda x: x.mT,
        lambda x: x.to(torch.float32),
        lambda x: torch.view_as_complex(x.view(3, 2)).real,
        lambda x: torch.view_as_complex(x.view(3, 2)).imag,
        lambda x: x.unflatten(1, (3, 1)).movedim(0, 1),
    ]
    after = {}
    for device in ("cpu", "xla"):
        for mode in (torch.no_grad, torch.inference_mode):
            for place, view in enumerate(views):
                x = torch.arange(6.0, device=device).view(2, 3)
                with mode():
                    view(x).mul_(2).add_(1)
                after[place, device, mode] = x.cpu().tolist()
    for (place, device, mode), found in after.items():
        assert found == after[place, "cpu", torch.no_grad], (place, device, mode)
