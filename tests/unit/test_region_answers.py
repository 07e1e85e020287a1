"""What the region answers in torch's place: equality, extremes, masks, norms, copies, random draws.

Each is compared with torch on the CPU, over shapes and dtypes, all in one compiled program.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from region_harness import ROWS, Apply, Probe

from spmdzero.backend import Mesh, current
from spmdzero.errors import ReplicaRegionError

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

SHAPES = ((), (1,), (0,), (2, 3), (2, 0), (2, 1, 3))
DTYPES = (
    torch.bool, torch.uint8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, which every dtype holds: `shape`, negative ones where there are."""
    numbers = (torch.arange(torch.Size(shape).numel()) * 7) % 5 - 2
    return (
        (numbers.abs() if dtype in (torch.bool, torch.uint8) else numbers).to(dtype).reshape(shape)
    )


def masked(x: torch.Tensor, value: Any, *indices: Any) -> torch.Tensor:
    x = x.clone()
    x[indices] = value
    return x


def normed(x: torch.Tensor, training: bool) -> torch.Tensor:
    """A batch norm's output and its statistics, flat."""
    mean, variance = x.new_zeros(3), x.new_ones(3)
    y = F.batch_norm(x, mean, variance, training=training, momentum=0.3)
    return torch.cat([y.reshape(-1), mean, variance])


def one(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=x.dtype, device=x.device)


def cases_of(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Case]:
    x, mask = values(shape, dtype), values(shape, torch.bool)
    found: dict[str, Case] = {
        "equal": (lambda x: torch.equal(x, x.clone()), (x,)),
        "equal to another dtype": (lambda x: torch.equal(x, x.to(torch.float64)), (x,)),
        "equal to another shape": (lambda x: torch.equal(x, x[None]), (x,)),
        "to the CPU and back": (lambda x: x.cpu().to(x.device), (x,)),
        "cast": (lambda x: x.to(torch.bfloat16), (x,)),
        "x[mask] = 1": (lambda x, m: masked(x, 1, m), (x, mask)),
        "x[mask] = tensor": (lambda x, m: masked(x, one(x), m), (x, mask)),
        "x[mask] = [1]": (lambda x, m: masked(x, one(x, 1), m), (x, mask)),
    }
    for extreme in (torch.amax, torch.amin):
        name = extreme.__name__
        found |= {
            name: (lambda x, f=extreme: f(x), (x,)),
            f"{name} dim=()": (lambda x, f=extreme: f(x, dim=()), (x,)),
            f"{name} dim=(), keepdim": (lambda x, f=extreme: f(x, dim=(), keepdim=True), (x,)),
        }
        for dim in {0, -1, len(shape) - 1, -len(shape)} if shape else ():
            found[f"{name} dim={dim}"] = (lambda x, f=extreme, d=dim: f(x, d), (x,))
            found[f"{name} dim={dim}, keepdim"] = (lambda x, f=extreme, d=dim: f(x, d, True), (x,))
    if len(shape) > 1 and shape[1]:
        found |= {
            "x[row mask] = 1": (lambda x, m: masked(x, 1, m), (x, mask[:, 0])),
            "x[:, mask] = 1": (lambda x, m: masked(x, 1, slice(None), m), (x, mask[0])),
            "x[mask of another shape] = 1": (lambda x, m: masked(x, 1, m[..., None]), (x, mask)),
        }
    return {f"{name}, {list(shape)} {dtype}": case for name, case in found.items()}


def all_cases(dtypes: tuple[torch.dtype, ...]) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for shape in SHAPES:
        for dtype in dtypes:
            found |= cases_of(shape, dtype)
    for a, b in (((2, 3), (2, 1)), ((2, 3), (3,)), ((0,), (1,)), ((2, 0), (0, 2)), ((2,), (3,))):
        found[f"equal {a} {b}"] = (torch.equal, (torch.ones(a), torch.ones(b)))
    found["equal with NaN"] = (lambda x: torch.equal(x, x.clone()), (torch.tensor(float("nan")),))
    for dtype in (dtype for dtype in dtypes if dtype.is_floating_point):
        nan = torch.tensor([-1, float("nan"), 1], dtype=dtype)
        keeping: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "relu": torch.relu,
            "gelu": F.gelu,
            "clamp": lambda x: x.clamp(-0.5, 0.5),
            "clamp from below": lambda x: x.clamp(min=0),
            "max": lambda x: x.max(),
            "min of a dim": lambda x: x.min(0).values,
            "amax": torch.amax,
            "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
            "minimum": lambda x: torch.minimum(torch.zeros_like(x), x),
            "max pool": lambda x: F.max_pool1d(x[None], 2, 1),
            "softmax": lambda x: x.softmax(0),
        }
        found |= {f"{name} of a NaN, {dtype}": (f, (nan,)) for name, f in keeping.items()}
        x = values((4, 3, 5), dtype)
        norms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "batch norm that trains": lambda x: normed(x, True),
            "batch norm that is frozen": lambda x: normed(x, False),
            "batch norm without statistics": lambda x: F.batch_norm(x, None, None, training=True),
            "layer norm": lambda x: F.layer_norm(x, (5,)),
            "group norm": lambda x: F.group_norm(x, 3),
            "instance norm": lambda x: F.instance_norm(x),
        }
        found |= {f"{name} {dtype}": (norm, (x,)) for name, norm in norms.items()}
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What errors kept of tensors is gone before another program of the process computes it.

    XLA divides by 0 where it reshapes one without elements in a program that is split.
    """
    yield
    gc.collect()


def outcome(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    try:
        return function(*inputs)
    except (RuntimeError, IndexError) as error:
        return error


def answers(cases: dict[str, Case], mesh: Mesh) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What each case is in the region, all in one pass: a tensor's values are in the second."""
    found: dict[str, Any] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        flat = []
        for name, (function, inputs) in cases.items():
            found[name] = outcome(function, *(tensor.to(x.device) for tensor in inputs))
            if isinstance(found[name], torch.Tensor):
                flat.append(found[name].to(torch.float64).reshape(-1))
                found[name] = found[name].shape, found[name].dtype
        return torch.cat(flat).repeat(2, 1)

    probe = Probe(Apply(forward), mesh)
    with torch.no_grad():
        row = probe(probe.batch(torch.zeros(ROWS, 1))).cpu()[0]
    tensors = {name: shape.numel() for name, (shape, _) in _made(found).items()}
    return found, dict(zip(tensors, row.split(list(tensors.values())), strict=True))


def _made(found: dict[str, Any]) -> dict[str, Any]:
    return {name: what for name, what in found.items() if isinstance(what, tuple)}


def rounding(dtype: torch.dtype) -> float:
    """Of a norm's few sums in another order; torch_xla's numbers, as a norm's eps, are fp32."""
    if not dtype.is_floating_point:
        return 0.0
    return 4 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    ("dtypes", "least"),
    [
        ((torch.bool, torch.int64, torch.bfloat16, torch.float32), 400),
        pytest.param(DTYPES, 800, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_what_the_region_answers_itself_is_what_torch_answers(
    mesh: Mesh, dtypes: tuple[torch.dtype, ...], least: int
) -> None:
    cases = all_cases(dtypes)
    found, numbers = answers(cases, mesh)
    wrong = []
    for name, (function, inputs) in cases.items():
        expected, actual = outcome(function, *inputs), found[name]
        if isinstance(expected, torch.Tensor) and name in numbers:
            flat = expected.double().reshape(-1)
            same = actual == (expected.shape, expected.dtype) and torch.allclose(
                numbers[name],
                flat,
                rtol=rounding(expected.dtype),
                atol=rounding(expected.dtype),
                equal_nan=True,
            )
        elif isinstance(expected, Exception):
            same = isinstance(actual, Exception)
        else:
            same = actual is expected
        if not same:
            wrong.append(f"{name}: {actual!r} {numbers.get(name)}, torch {expected!r}")
    assert not wrong, "\n".join(line[:300] for line in wrong)
    assert len(numbers) > least


def test_equality_across_devices_and_a_mask_of_another_shape_are_refused_in_words(
    mesh: Mesh,
) -> None:
    refused: dict[str, Callable[[torch.Tensor], Any]] = {
        "one on cpu. Move one": lambda x: torch.equal(x, torch.ones(2, 3)),
        "does not match the dims from 0": lambda x: masked(x, 1, torch.ones_like(x.T) > 0),
        NOTHING_TO_COMPARE: lambda x: torch.amax(x[:0], dim=()),
    }
    found, _ = answers(
        {text: (f, (torch.ones(2, 3),)) for text, f in refused.items()} | _dull, mesh
    )
    for text in refused:
        assert isinstance(found[text], ReplicaRegionError)
        assert text in str(found[text])


# On JAX the words are torch's own.
NOTHING_TO_COMPARE = {
    "torch_xla": "of no elements. Name a dim",
    "jax": "reducing over zero-size dimension",
}[current().name]
# A pass has to return something.
_dull: dict[str, Case] = {"dull": (lambda x: x, (torch.ones(1),))}


# -- random draws ----------------------------------------------------------------------------

FLOATS = (torch.float16, torch.bfloat16, torch.float64)
DRAWN = (*FLOATS, torch.bool, torch.int64)
# name -> draws of (shape, dtype, device), the support's least and highest value.
Draw = tuple[Callable[..., torch.Tensor], float, float]
DRAWS: dict[str, Draw] = {
    "rand": (lambda s, d, v: torch.rand(s, dtype=d, device=v), 0, 1),
    "rand_like": (lambda s, d, v: torch.rand_like(torch.zeros(s, dtype=d, device=v)), 0, 1),
    "randn": (lambda s, d, v: torch.randn(s, dtype=d, device=v), -7, 7),
    "randn_like": (lambda s, d, v: torch.randn_like(torch.zeros(s, dtype=d, device=v)), -7, 7),
    "randint": (lambda s, d, v: torch.randint(2, 5, s, dtype=d, device=v), 2, 4),
    "randint of one": (lambda s, d, v: torch.randint(0, 1, s, dtype=d, device=v), 0, 0),
    # 299 is 300 in bfloat16.
    "randint that is too large": (
        lambda s, d, v: torch.randint(0, 300, s, dtype=d, device=v), 0, 300,
    ),
    "randint of none": (lambda s, d, v: torch.randint(5, 5, s, dtype=d, device=v), 0, 0),
    "randint_like": (
        lambda s, d, v: torch.randint_like(torch.zeros(s, dtype=d, device=v), 2), 0, 1,
    ),
    "random_": (lambda s, d, v: torch.zeros(s, dtype=d, device=v).random_(0, 2), 0, 1),
    "uniform_": (lambda s, d, v: torch.zeros(s, dtype=d, device=v).uniform_(2, 3), 2, 3),
    "uniform_ backwards": (lambda s, d, v: torch.zeros(s, dtype=d, device=v).uniform_(3, 2), 2, 3),
    "normal_": (lambda s, d, v: torch.zeros(s, dtype=d, device=v).normal_(1, 0.5), -4, 6),
    "normal_ of a negative width": (
        lambda s, d, v: torch.zeros(s, dtype=d, device=v).normal_(1, -1), -4, 6,
    ),
    "normal of tensors": (
        lambda s, d, v: torch.normal(
            torch.zeros(s, dtype=d, device=v), torch.ones(s, dtype=d, device=v)
        ), -7, 7,
    ),
    "exponential_": (lambda s, d, v: torch.zeros(s, dtype=d, device=v).exponential_(2), 0, 20),
    "exponential_ of rate 0": (
        lambda s, d, v: torch.zeros(s, dtype=d, device=v).exponential_(0), 0, 20,
    ),
    "bernoulli": (lambda s, d, v: torch.bernoulli(torch.zeros(s, dtype=d, device=v)), 0, 0),
    "bernoulli_": (lambda s, d, v: torch.zeros(s, dtype=d, device=v).bernoulli_(0.5), 0, 1),
    "bernoulli_ of more than 1": (
        lambda s, d, v: torch.zeros(s, dtype=d, device=v).bernoulli_(1.5), 0, 1,
    ),
    "dropout": (lambda s, d, v: F.dropout(torch.ones(s, dtype=d, device=v), 0.5), 0, 2),
    "multinomial": (lambda s, d, v: torch.multinomial(torch.ones(s, dtype=d, device=v), 1), 0, 2),
    "multinomial with replacement": (
        lambda s, d, v: torch.multinomial(torch.ones(s, dtype=d, device=v), 4, True), 0, 2,
    ),
    "multinomial of too many": (
        lambda s, d, v: torch.multinomial(torch.ones(s, dtype=d, device=v), 4), 0, 2,
    ),
    "randperm": (lambda s, d, v: torch.randperm(len(s), dtype=d, device=v), 0, 1),
}  # fmt: skip


def drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    draw = DRAWS[name][0]
    return (lambda like: draw(shape, dtype, like.device)), (torch.zeros(()),)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:to - 1 is out of bounds")
def test_random_draws_have_torchs_shapes_dtypes_support_and_errors(mesh: Mesh) -> None:
    chosen = {
        f"{name}, {list(shape)} {dtype}": (name, shape, dtype)
        for name in DRAWS
        for shape, dtypes in (((), (torch.float32,)), ((0,), FLOATS), ((2, 3), DRAWN))
        for dtype in dtypes
        # Integers are multiplied by a float there, which torch refuses on the CPU only.
        if name != "dropout" or dtype.is_floating_point
    }
    cases = {label: drawn(*which) for label, which in chosen.items()}
    found, numbers = answers(cases, mesh)
    wrong = []
    for label, (function, inputs) in cases.items():
        expected, actual = outcome(function, *inputs), found[label]
        name, _, _ = chosen[label]
        if isinstance(expected, torch.Tensor) and label in numbers:
            low, high = DRAWS[name][1:]
            same = (
                actual == (expected.shape, expected.dtype)
                and not (numbers[label] < low).any()
                and not (numbers[label] > high).any()
            )
        else:
            same = isinstance(expected, Exception) and isinstance(actual, RuntimeError)
        if not same:
            wrong.append(f"{label}: {actual!r} {numbers.get(label)}, torch {expected!r}")
    assert not wrong, "\n".join(line[:300] for line in wrong)
    assert len(numbers) > 120
