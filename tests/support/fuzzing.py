"""Random functions of views, writes, indexing and dtypes, run step by step in two places at once.

None makes a small error large: no integer and no choice is made of a computed float, whose last bit
is another on another processor.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
OTHERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64)
# What the bits of integers may be read as.
_BITS = {
    torch.int64: (torch.int32, torch.int8),
    torch.int32: (torch.int8,),
    torch.int8: (torch.uint8,),
    torch.uint8: (torch.int8,),
}
# What torch_xla refuses by name.
UNWRITABLE = "writes into what expand or unfold returned"
Tensors = Sequence[Tensor]
Step = Callable[[Tensors], Any]
Maker = Callable[["Writer"], tuple[str, Step] | None]


class Writer:
    """Writes steps that fit the tensors there are so far.

    Args:
        seed: of all that it chooses.
        dtypes: of the tensors that it makes.
        strided: whether it may choose what needs a storage, which torch_xla's tensors lack.
    """

    def __init__(self, seed: int, *, dtypes: Sequence[torch.dtype], strided: bool = True) -> None:
        self.rng, self.dtypes, self.strided = random.Random(seed), dtypes, strided
        self.trained = dtypes == (torch.float64,)
        self.tensors: list[Tensor] = []

    def fresh(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.rng.choice(self.dtypes)
        generator = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            return torch.randn(tuple(shape), generator=generator, dtype=wide).to(dtype)
        low, high = (0, 2) if dtype == torch.bool else (0, 9) if dtype == torch.uint8 else (-9, 9)
        return torch.randint(low, high, tuple(shape), generator=generator).to(dtype)

    def pick(self, fits: Callable[[Tensor], bool] = lambda _: True) -> int | None:
        """The number of one that fits, a late one more often."""
        found = [i for i, tensor in enumerate(self.tensors) if fits(tensor)]
        if not found:
            return None
        return self.rng.choice(found[-6:] if self.rng.random() < 0.5 else found)

    def source(self, like: Tensor) -> tuple[str, Step]:
        """What may be written into `like`: a copy of another tensor, or new numbers."""
        found = [
            i
            for i, t in enumerate(self.tensors)
            if t.dtype == like.dtype
            and t.dim() <= like.dim()
            and all(a in (b, 1) for a, b in zip(t.shape[::-1], like.shape[::-1], strict=False))
        ]
        if found and self.rng.random() < 0.7:
            place = self.rng.choice(found)
            return f"t{place}.clone()", lambda ts: ts[place].clone()
        shape = [self.rng.choice((1, n)) for n in like.shape]
        made = self.fresh(shape, like.dtype)
        return f"new{shape}", lambda ts: made.to(ts[0].device)

    def number(self, dtype: torch.dtype) -> Any:
        if dtype == torch.bool:
            return self.rng.choice((True, False))
        if dtype.is_floating_point or dtype.is_complex:
            return self.rng.choice((0.5, -1.5, 2.0, 3))
        return self.rng.choice((1, 2, 3))

    def dim(self, tensor: Tensor) -> int:
        return self.rng.randrange(-tensor.dim(), tensor.dim())


def _with_dims(count: int) -> Callable[[Tensor], bool]:
    return lambda tensor: tensor.dim() >= count


def _apart(tensor: Tensor) -> bool:
    """Whether each of its elements has a place of its own, as those of an expanded one don't."""
    return all(step or n == 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _index(w: Writer, tensor: Tensor) -> tuple[Any, ...]:
    made: list[Any] = []
    for n in tensor.shape:
        kind = w.rng.random()
        if kind < 0.3 and n:
            made.append(w.rng.randrange(-n, n))
        elif kind < 0.6:
            made.append(slice(w.rng.randint(0, n), None, w.rng.choice((None, 2))))
        else:
            made.append(slice(None))
    return tuple(made)


def _turned(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(_with_dims(2))
    if i is None:
        return None
    order = w.rng.sample(range(w.tensors[i].dim()), w.tensors[i].dim())
    return f"t{i}.permute({order})", lambda ts: ts[i].permute(order)


def _part(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(_with_dims(1))
    if i is None:
        return None
    index = _index(w, w.tensors[i])
    return f"t{i}[{index}]", lambda ts: ts[i][index]


def _piece(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: t.dim() >= 1 and 0 not in t.shape)
    if i is None:
        return None
    dim, name = w.dim(w.tensors[i]), w.rng.choice(("split", "chunk", "unbind", "tensor_split"))
    args = (dim,) if name == "unbind" else (w.rng.choice((1, 2)), dim)
    place = w.rng.randrange(len(getattr(w.tensors[i], name)(*args)))
    return f"t{i}.{name}{args}[{place}]", lambda ts: getattr(ts[i], name)(*args)[place]


def _shaped(w: Writer) -> tuple[str, Step] | None:
    i = w.pick()
    assert i is not None
    t = w.tensors[i]
    kind = w.rng.choice(("unsqueeze", "squeeze", "flatten", "reshape", "expand"))
    if kind == "unsqueeze":
        dim = w.rng.randint(-t.dim() - 1, t.dim())
        return f"t{i}.unsqueeze({dim})", lambda ts: ts[i].unsqueeze(dim)
    if kind == "squeeze":
        return f"t{i}.squeeze()", lambda ts: ts[i].squeeze()
    if kind == "expand":
        sizes = [1, *[w.rng.choice((2, 3)) if n == 1 else -1 for n in t.shape]]
        return f"t{i}.expand({sizes})", lambda ts: ts[i].expand(sizes)
    whole = t if t._base is None else t._base
    if not w.strided and not whole.is_contiguous():
        return None
    if kind == "flatten" or t.numel() % 2 or not t.numel():
        return f"t{i}.flatten()", lambda ts: ts[i].flatten()
    return f"t{i}.reshape(2, -1)", lambda ts: ts[i].reshape(2, -1)


def _diagonal(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(_with_dims(2))
    if i is None:
        return None
    dims = w.rng.sample(range(w.tensors[i].dim()), 2)
    offset = w.rng.randint(-1, 1)
    return f"t{i}.diagonal({offset}, {dims})", lambda ts: ts[i].diagonal(offset, *dims)


def _strided(w: Writer) -> tuple[str, Step] | None:
    # Of a view torch knows the gradient of what is outside of it, in the storage that it shares.
    i = w.pick(lambda t: not (w.trained and t._is_view()))
    if i is None or not w.strided:
        return None
    t, count = w.tensors[i], w.rng.randint(1, 3)
    size = [w.rng.choice((1, 2, 3)) for _ in range(count)]
    stride, offset = [w.rng.choice((1, 2, 3, 4)) for _ in range(count)], w.rng.choice((None, 0, 1))
    first = t.storage_offset() if offset is None else offset
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    places = {0}
    for n, step in zip(size, stride, strict=True):
        places = {place + k * step for place in places for k in range(n)}
    # What is written into one place twice is undefined in torch, too.
    if last >= t.untyped_storage().nbytes() // t.element_size() or len(places) < math.prod(size):
        return None
    said = f"t{i}.as_strided({size}, {stride}, {offset})"
    return said, lambda ts: ts[i].as_strided(size, stride, offset)


def _windows(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: t.dim() >= 1 and 0 not in t.shape)
    if i is None:
        return None
    dim = w.dim(w.tensors[i])
    size = w.rng.randint(1, w.tensors[i].shape[dim])
    # Windows that overlap would be written twice.
    step = size + w.rng.randint(0, 1)
    return f"t{i}.unfold({dim}, {size}, {step})", lambda ts: ts[i].unfold(dim, size, step)


def _as_bits(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: t.dim() >= 1 and t.dtype in _BITS and t.stride(-1) == 1)
    if i is None:
        return None
    to = w.rng.choice(_BITS[w.tensors[i].dtype])
    return f"t{i}.view({to})", lambda ts: ts[i].view(to)


def _of_complex(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: t.is_complex())
    # XLA ends the process where such a view of a turned tensor is turned once more on torch_xla.
    if i is None or not w.strided:
        return None
    name = w.rng.choice(("real", "imag", "conj", "pairs"))
    if name == "pairs":
        return f"view_as_real(t{i})", lambda ts: torch.view_as_real(ts[i])
    if name == "conj":
        return f"t{i}.conj()", lambda ts: ts[i].conj()
    return f"t{i}.{name}", lambda ts: getattr(ts[i], name)


def _detached(w: Writer) -> tuple[str, Step] | None:
    i = w.pick()
    return f"t{i}.detach()", lambda ts: ts[i].detach()  # type: ignore[index]


def _into(w: Writer) -> tuple[str, Step] | None:
    i = w.pick()
    assert i is not None
    said, source = w.source(w.tensors[i])
    name = w.rng.choice(("add_", "mul_", "copy_"))
    return f"t{i}.{name}({said})", lambda ts: getattr(ts[i], name)(source(ts))


def _by_number(w: Writer) -> tuple[str, Step] | None:
    i = w.pick()
    assert i is not None
    number = w.number(w.tensors[i].dtype)
    name = w.rng.choice(("fill_", "mul_", *(() if isinstance(number, bool) else ("add_",))))
    return f"t{i}.{name}({number})", lambda ts: getattr(ts[i], name)(number)


def _elementwise(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: t.is_floating_point())
    if i is None:
        return None
    name = w.rng.choice(("tanh_", "sigmoid_", "neg_", "relu_", "square_", "zero_"))
    return f"t{i}.{name}()", lambda ts: getattr(ts[i], name)()


def _put(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: t.dim() >= 1 and _apart(t))
    if i is None:
        return None
    index = _index(w, w.tensors[i])
    if w.rng.random() < 0.4:
        number = w.number(w.tensors[i].dtype)
        return f"t{i}[{index}] = {number}", lambda ts: ts[i].__setitem__(index, number)
    said, source = w.source(w.tensors[i][index])
    return f"t{i}[{index}] = {said}", lambda ts: ts[i].__setitem__(index, source(ts))


def _put_at(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: t.dim() >= 1 and 0 not in t.shape and _apart(t))
    if i is None:
        return None
    t = w.tensors[i]
    before = w.rng.randrange(t.dim())
    places = torch.tensor(w.rng.sample(range(t.shape[before]), w.rng.randint(1, t.shape[before])))
    said, source = w.source(t[(slice(None),) * before + (places,)])

    def put(ts: Tensors) -> None:
        ts[i][(slice(None),) * before + (places.to(ts[i].device),)] = source(ts)

    return f"t{i}[{':, ' * before}{places.tolist()}] = {said}", put


def _put_where(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: t.dim() >= 1 and not t.is_complex() and 0 not in t.shape and _apart(t))
    if i is None:
        return None
    t = w.tensors[i]
    number, before = w.number(t.dtype), w.rng.randrange(t.dim())
    dims = w.rng.randint(1, t.dim() - before)
    mask = w.fresh(t.shape[before : before + dims], torch.bool)
    index = (slice(None),) * before
    shown = f"t{i}[{':, ' * before}{mask.tolist()}]"
    chosen = t[(*index, mask)]
    if w.rng.random() < 0.5:
        value = w.fresh(chosen.shape[-1:] if before + dims < t.dim() else chosen.shape, t.dtype)

        def each(ts: Tensors) -> None:
            ts[i][(*index, mask.to(ts[i].device))] = value.to(ts[i].device)

        return f"{shown} = new{list(value.shape)}", each

    def one(ts: Tensors) -> None:
        ts[i][(*index, mask.to(ts[i].device))] = number

    return f"{shown} = {number}", one


def _scattered(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: t.dim() >= 1 and 0 not in t.shape and t.dtype != torch.bool)
    if i is None:
        return None
    t = w.tensors[i]
    dim, name = w.rng.randrange(t.dim()), w.rng.choice(("index_add_", "scatter_add_", "scatter_"))
    shape = list(t.shape)
    # One at a time, or the order would decide what `scatter_` leaves.
    shape[dim] = 1 if name == "scatter_" else w.rng.randint(1, 3)
    places = (shape[dim],) if name == "index_add_" else tuple(shape)
    at = torch.tensor([w.rng.randrange(t.shape[dim]) for _ in range(torch.Size(places).numel())])
    at, value = at.reshape(places), w.fresh(shape, t.dtype)
    said = f"t{i}.{name}({dim}, {at.tolist()}, new)"
    return said, lambda ts: getattr(ts[i], name)(dim, at.to(ts[i].device), value.to(ts[i].device))


def _listed(w: Writer) -> tuple[str, Step] | None:
    i, j = (w.pick(lambda t: t.is_floating_point()) for _ in range(2))
    if i is None or j is None:
        return None
    return f"_foreach_mul_(t{i}, t{j})", lambda ts: torch._foreach_mul_([ts[i], ts[j]], 0.5)


def _with_other(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: t.dtype != torch.bool)
    if i is None:
        return None
    said, source = w.source(w.tensors[i])
    name = w.rng.choice(("add", "mul", "sub"))
    return f"t{i}.{name}({said})", lambda ts: getattr(ts[i], name)(source(ts))


def _reduced(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: t.dim() >= 1 and t.is_floating_point() and 0 not in t.shape)
    if i is None:
        return None
    dim, name = w.dim(w.tensors[i]), w.rng.choice(("sum", "mean", "logsumexp", "cumsum", "softmax"))
    return f"t{i}.{name}({dim})", lambda ts: getattr(ts[i], name)(dim)


def _joined(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(_with_dims(1))
    if i is None:
        return None
    dim, name = w.dim(w.tensors[i]), w.rng.choice(("cat", "stack", "flip", "roll"))
    if name in ("cat", "stack"):
        return f"{name}(t{i}, t{i}, {dim})", lambda ts: getattr(torch, name)([ts[i], ts[i]], dim)
    args = (dim,) if name == "flip" else (1, dim)
    return f"t{i}.{name}{args}", lambda ts: getattr(ts[i], name)(*args)


def _taken(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: t.dim() >= 1 and 0 not in t.shape)
    if i is None:
        return None
    t = w.tensors[i]
    before = w.rng.randrange(t.dim())
    n = t.shape[before]
    places = torch.tensor([w.rng.randrange(-n, n) for _ in range(3)])
    index = (slice(None),) * before
    said = f"t{i}[{':, ' * before}{places.tolist()}]"
    return said, lambda ts: ts[i][(*index, places.to(ts[i].device))]


def _cast(w: Writer) -> tuple[str, Step] | None:
    i = w.pick(lambda t: not t.is_complex())
    if i is None or w.trained:
        return None
    t = w.tensors[i]
    exact = not t.is_floating_point()
    # A wider float would have the error of a narrow one.
    found = [
        d
        for d in w.dtypes
        if (d.is_floating_point and (exact or d.itemsize <= t.element_size()))
        or (exact and not d.is_complex)
    ]
    dtype = w.rng.choice(found)
    return f"t{i}.to({dtype})", lambda ts: ts[i].to(dtype)


def _where(w: Writer) -> tuple[str, Step] | None:
    i = w.pick()
    assert i is not None
    said, source = w.source(w.tensors[i])
    mask = w.fresh(w.tensors[i].shape, torch.bool)

    def chosen(ts: Tensors) -> Tensor:
        return torch.where(mask.to(ts[i].device), ts[i], source(ts))

    return f"where({mask.tolist()}, t{i}, {said})", chosen


VIEWS: tuple[Maker, ...] = (
    _turned, _part, _piece, _shaped, _shaped, _diagonal, _strided, _windows, _as_bits, _of_complex,
    _detached,
)  # fmt: skip
WRITES: tuple[Maker, ...] = (
    _into, _into, _by_number, _elementwise, _put, _put, _put_at, _put_where, _put_where, _scattered,
    _listed,
)  # fmt: skip
PURE: tuple[Maker, ...] = (
    _with_other, _with_other, _reduced, _joined, _taken, _cast, _where,
)  # fmt: skip
# Both would have to be refused; who calls it twice in a function has nothing to compare then.
_REFUSED = (RuntimeError, IndexError, NotImplementedError, TypeError)


class DifferenceError(AssertionError):
    """Where two places don't agree, with the steps that led there."""


class Function:
    """A random function, run on the CPU and on a device as it is written.

    Attributes:
        log: its steps.
        plain, ours: the tensors of both, in the order in which they were made.
        leaves: those of both that are trained.
    """

    def __init__(self, seed: int, device: torch.device, **how: Any) -> None:
        self._writer = Writer(seed, **how)
        self.log: list[str] = [f"seed {seed}"]
        self.plain, self.ours = self._writer.tensors, list[Tensor]()
        self.leaves: list[tuple[Tensor, Tensor]] = []
        rng, trained = self._writer.rng, self._writer.trained
        for _ in range(rng.randint(1, 3)):
            plain = self._writer.fresh([rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 3))])
            ours = plain.to(device)
            self.log.append(f"t{len(self.plain)} = new {plain.dtype} {list(plain.shape)}")
            if trained:
                pair = (plain.requires_grad_(), ours.requires_grad_())
                self.leaves.append(pair)
                plain, ours = plain * 1, ours * 1
            self._add(plain, ours)
        for _ in range(rng.randint(4, 14)):
            kind = rng.choice((VIEWS, VIEWS, WRITES, WRITES, PURE))
            try:
                step = rng.choice(kind)(self._writer)
            except _REFUSED:
                # As of a part of several, of which another was written.
                break
            if step is not None and not self._take(*step, keeps=kind is not WRITES):
                break

    def _add(self, plain: Tensor, ours: Tensor) -> None:
        self.plain.append(plain)
        self.ours.append(ours)

    def _take(self, said: str, step: Step, *, keeps: bool) -> bool:
        """Runs a step in both places; whether the function goes on."""
        self.log.append(said)
        made: list[Any] = []
        for tensors in (self.ours, self.plain):
            try:
                made.append(step(tensors))
            except _REFUSED as error:
                if UNWRITABLE in str(error) and not self._writer.strided:
                    # Nothing is written then, in neither place.
                    return False
                made.append(error)
        ours, plain = made
        failed = [isinstance(each, Exception) for each in (plain, ours)]
        if failed == [True, False] and not _harmless(plain):
            raise DifferenceError(self.told(f"torch refuses it: {plain}"))
        if failed == [False, True]:
            raise DifferenceError(self.told(f"torch computes it: {type(ours).__name__}: {ours}"))
        if any(failed):
            return False
        if keeps and plain.numel() <= 256:
            self._add(plain, ours)
        return True

    def told(self, what: str) -> str:
        """What is wrong and the steps that led there."""
        return "\n  ".join([what, *self.log])

    def backward(self) -> None:
        """Has both places compute the gradients of a scalar of all tensors.

        Raises:
            DifferenceError: one of them can't.
        """
        failed: list[Exception | None] = []
        for tensors in (self.plain, self.ours):
            trained = [t for t in tensors if t.requires_grad]
            try:
                terms = [(t * (0.3 + 0.1 * i)).sin().sum() for i, t in enumerate(trained)]
                if terms:
                    torch.stack(terms).sum().backward()
            except RuntimeError as error:
                # As of a tensor that was saved and is written into.
                failed.append(error)
            else:
                failed.append(None)
        if (failed[0] is None) != (failed[1] is None):
            raise DifferenceError(self.told(f"the backward: {failed}"))

    def pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """What has to agree."""
        for place, (plain, ours) in enumerate(zip(self.plain, self.ours, strict=True)):
            yield f"t{place}", plain.detach(), ours.detach()
        for place, (plain, ours) in enumerate(self.leaves):
            if plain.grad is not None and ours.grad is not None:
                yield f"gradient {place}", plain.grad, ours.grad
            elif plain.grad is not ours.grad:
                raise DifferenceError(self.told(f"one of them has no gradient {place}"))

    def check(self) -> None:
        """Reads both.

        Raises:
            DifferenceError: a value, a shape or a dtype is another.
        """
        for name, plain, ours in self.pairs():
            try:
                torch.testing.assert_close(
                    ours.cpu(), plain.resolve_conj().resolve_neg(), equal_nan=True, **_bounds(plain)
                )
            except AssertionError as error:
                raise DifferenceError(self.told(f"{name}: {error}")) from None


def _harmless(error: Exception) -> bool:
    """Whether torch refuses for the sake of memory that devices' tensors don't have in common."""
    said = str(error)
    return "a single memory location" in said or "not implemented for" in said


def _bounds(like: Tensor) -> dict[str, float]:
    """Of up to 14 operations, each of which may double an error, and a few of which do."""
    if not (like.is_floating_point() or like.is_complex()):
        return {"rtol": 0, "atol": 0}
    eps = torch.finfo(like.dtype).eps
    finite = like.abs()[like.abs().isfinite()]
    largest = finite.max().item() if finite.numel() else 1.0
    # A difference of large numbers has their error.
    return {"rtol": 0, "atol": (32 if eps > 1e-3 else 512) * eps * max(largest, 1.0)}
