"""Random numbers inside the replica region: different on every replica, repeatable by a seed.

A compiler draws the same numbers on every device there. So each random operation is rebuilt from
a counter-based hash of (key, replica, element). The key is drawn from torch's CPU generator, so
`torch.manual_seed` makes it repeat, and torch.utils.checkpoint, which restores that generator,
recomputes with the masks of its forward.

If spmdzero also provides the devices' own generator, a backend makes these operations of `Random`,
with streams of that generator.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spmdzero.backend._keys import draw_key

_aten = torch.ops.aten
# Named in the error about a random operation without a replacement below.
KNOWN_DRAWS = (
    "rand, randn, randint, randperm, multinomial, bernoulli, dropout, normal_, uniform_ or "
    "exponential_"
)
_SHORT_MANTISSA = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11}


def has_generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a draw is given a `torch.Generator`."""
    return any(isinstance(value, torch._C.Generator) for value in (*args, *kwargs.values()))


def _scramble(bits: torch.Tensor) -> torch.Tensor:
    # The finaliser of MurmurHash3 on int32.
    bits = (bits ^ _shifted(bits, 16)) * -2048144789
    bits = (bits ^ _shifted(bits, 13)) * -1028477387
    return bits ^ _shifted(bits, 16)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shifts int32 to the right as if it were unsigned."""
    # `>>` copies the sign bit, which the mask removes. torch_xla divides a negative number instead
    # and rounds towards zero; clearing the low bits first makes both backends give the same
    # numbers.
    return ((bits & -(1 << by)) >> by) & ((1 << (32 - by)) - 1)


class Random:
    """Random numbers from a stream of bits for each draw."""

    def stream(self) -> torch.Tensor:
        """An int32 `[1]` on the devices, different for each draw."""
        raise NotImplementedError

    def bits(self, shape: torch.Size) -> torch.Tensor:
        """`shape` int32, uniform over 23 bits: float32 holds these plus half a step exactly.

        Raises:
            ValueError: an int32 can't count so many elements.
        """
        stream, count = self.stream(), math.prod(shape)
        if count > 1 << 31:
            raise ValueError(f"{count} random numbers are more than {1 << 31}: draw parts")
        index = torch.arange(count, dtype=torch.int32, device=stream.device)
        return ((_scramble(_scramble(index ^ stream) + stream)) & 0x7FFFFF).reshape(shape)

    def uniform(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`shape` in (0, 1); [0, 1) if the rounding of `dtype` would reach 1.

        Raises:
            ValueError: `dtype` is not a floating dtype.
        """
        values = (self.bits(shape).to(torch.float32) + 0.5) * (1.0 / (1 << 23))
        if _floating(dtype) in _SHORT_MANTISSA:
            steps = _SHORT_MANTISSA[dtype]
            values = (values * steps).floor() * (1.0 / steps)
        return values.to(dtype)

    def normal(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """`shape`, standard normal, by Box and Muller; `dtype` must be floating."""
        radius = torch.sqrt(-2.0 * torch.log(self.uniform(shape)))
        angle = 2 * math.pi * self.uniform(shape)
        return (radius * torch.cos(angle)).to(_floating(dtype))

    def exponential(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """`shape`, exponential with rate 1; `dtype` must be floating."""
        return (-torch.log(self.uniform(shape))).to(_floating(dtype))

    def integers(self, low: int, high: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Integers of `shape` in [low, high).

        Raises:
            ValueError: the range is empty, or `dtype` doesn't hold all of it.
        """
        span = high - low
        if span <= 0:
            raise ValueError(f"no integer is in [{low}, {high})")
        if dtype == torch.bool:
            lowest, highest = 0, 1
        elif dtype.is_floating_point:
            lowest, highest = int(torch.finfo(dtype).min), int(torch.finfo(dtype).max)
        else:
            lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        if low < lowest or high - 1 > highest or span >= 1 << 63:
            raise ValueError(f"{dtype} does not hold the integers in [{low}, {high})")
        wide = self.bits(shape).to(torch.int64) * (1 << 23) + self.bits(shape)
        if span > 1 << 23:
            # A large span takes all 63 bits of an int64, so that the remainder stays uniform.
            wide = (wide + (self.bits(shape).to(torch.int64) << 46)) & ((1 << 63) - 1)
        return (low + wide % span).to(dtype)


class ReplicaRandom(Random):
    """Draws per replica. `replica` is `[1]` int32 in replica space, `key` makes a new key."""

    def __init__(self, replica: torch.Tensor, key: Callable[[int], torch.Tensor]) -> None:
        self.replica, self.key = replica, key

    def stream(self) -> torch.Tensor:
        """A stream that differs on each replica."""
        return stream_of(self.replica, self.key(draw_key()))


def stream_of(number: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The stream for a number, `[1]` int32, and a key, 0-dim int32."""
    return _scramble(_scramble(number * 0x3C6EF35F + 0x1F123BB5) ^ key)


def _floating(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise ValueError(f"random numbers of {dtype} are not drawn here: draw floats, and cast")
    return dtype


def _dtype(kwargs: dict[str, Any], default: torch.dtype) -> torch.dtype:
    return kwargs.get("dtype") or default


def _dropout(
    rng: Random, x: torch.Tensor, p: float, train: bool | None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = rng.uniform(x.shape) >= p
    return x * keep.to(x.dtype) * (1.0 / (1.0 - p) if p < 1 else 0.0), keep


def _multinomial(
    rng: Random, weights: torch.Tensor, count: int, replacement: bool = False, **_: Any
) -> torch.Tensor:
    _floating(weights.dtype)
    if weights.dim() not in (1, 2):
        raise ValueError(f"the weights have {weights.dim()} dims, not 1 or 2")
    if not weights.shape[-1]:
        raise ValueError("invalid multinomial distribution (sum of probabilities <= 0)")
    # The Gumbel trick: the `count` largest of log w + Gumbel are drawn without replacement.
    scores = torch.log(weights.to(torch.float32))
    if replacement:
        shape = torch.Size((*weights.shape[:-1], count, weights.shape[-1]))
        return (scores.unsqueeze(-2) - torch.log(rng.exponential(shape, torch.float32))).argmax(-1)
    noisy = scores - torch.log(rng.exponential(weights.shape, torch.float32))
    return noisy.topk(count, dim=-1).indices


def _exponential(rng: Random, x: torch.Tensor, rate: float = 1.0, **_: Any) -> torch.Tensor:
    if rate <= 0:
        raise ValueError(f"exponential_ expects lambda > 0.0, but found lambda={rate}")
    return rng.exponential(x.shape, x.dtype) / rate


def _bernoulli(rng: Random, x: torch.Tensor, p: Any = None, **_: Any) -> torch.Tensor:
    if p is None:
        p = x.to(_floating(x.dtype))
    elif not isinstance(p, torch.Tensor) and not 0 <= p <= 1:
        raise ValueError(f"the probability {p} is not in [0, 1]")
    return (rng.uniform(x.shape) < p).to(x.dtype)


def _rrelu_functional(
    rng: Random,
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise
    slopes = torch.where(x <= 0, _uniform(rng, x, lower, upper), 1.0).to(x.dtype)
    return x * slopes, slopes


def _rrelu(
    rng: Random, x: torch.Tensor, noise: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    made, slopes = _rrelu_functional(rng, x, noise, *args, **kwargs)
    noise.copy_(slopes)
    return made


def _uniform(
    rng: Random, x: torch.Tensor, low: float = 0.0, high: float = 1.0, **_: Any
) -> torch.Tensor:
    if low > high:
        raise ValueError(f"no number is in [{low}, {high})")
    return low + (high - low) * rng.uniform(x.shape, x.dtype)


def _normal(
    rng: Random, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any
) -> torch.Tensor:
    if std < 0:
        raise ValueError(f"normal expects std >= 0.0, but found std {std}")
    return mean + std * rng.normal(x.shape, x.dtype)


def _random_from(
    rng: Random, x: torch.Tensor, low: int, high: int | None, **_: Any
) -> torch.Tensor:
    if high is None:
        raise ValueError(f"random_({low}, None) has no upper end. Name one")
    return rng.integers(low, high, x.shape, x.dtype)


def _float(kwargs: dict[str, Any]) -> torch.dtype:
    return _dtype(kwargs, torch.get_default_dtype())


def _permutation(rng: Random, n: int, **kwargs: Any) -> torch.Tensor:
    dtype = _dtype(kwargs, torch.int64)
    if dtype == torch.bool:
        raise ValueError("a permutation of bools is none")
    return rng.uniform(torch.Size((n,))).argsort().to(dtype)


# torch_xla functionalises first: `x.normal_()` arrives as `normal_functional(x)`.
REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    _aten.native_dropout.default: _dropout,
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli.p: _bernoulli,
    _aten.bernoulli.Tensor: _bernoulli,
    # A mode doesn't receive default arguments.
    _aten.bernoulli_.float: lambda rng, x, p=0.5, **_: _bernoulli(rng, x, p),
    _aten.rand.default: lambda rng, size, **k: rng.uniform(torch.Size(size), _float(k)),
    _aten.rand_like.default: lambda rng, x, **k: rng.uniform(x.shape, _dtype(k, x.dtype)),
    _aten.randn.default: lambda rng, size, **k: rng.normal(torch.Size(size), _float(k)),
    _aten.randn_like.default: lambda rng, x, **k: rng.normal(x.shape, _dtype(k, x.dtype)),
    _aten.randint.default: lambda rng, high, size, **k: rng.integers(
        0, high, torch.Size(size), _dtype(k, torch.int64)
    ),
    _aten.randint.low: lambda rng, low, high, size, **k: rng.integers(
        low, high, torch.Size(size), _dtype(k, torch.int64)
    ),
    _aten.randint_like.default: lambda rng, x, high, **k: rng.integers(
        0, high, x.shape, _dtype(k, x.dtype)
    ),
    _aten.randint_like.low_dtype: lambda rng, x, low, high, **k: rng.integers(
        low, high, x.shape, _dtype(k, x.dtype)
    ),
    getattr(_aten.random, "from"): _random_from,
    _aten.random.to: lambda rng, x, high, **_: rng.integers(0, high, x.shape, x.dtype),
    _aten.randperm.default: _permutation,
    _aten.multinomial.default: _multinomial,
    _aten.rrelu_with_noise.default: _rrelu,
    _aten.rrelu_with_noise_functional.default: _rrelu_functional,
    _aten.uniform.default: _uniform,
    _aten.normal_functional.default: _normal,
    _aten.normal.float_float: lambda rng, mean, std, size, **k: (
        mean + std * rng.normal(torch.Size(size), _float(k))
    ),
    _aten.normal.Tensor_float: lambda rng, mean, std=1.0, **_: (
        mean + std * rng.normal(mean.shape, mean.dtype)
    ),
    _aten.normal.float_Tensor: lambda rng, mean, std, **_: (
        mean + std * rng.normal(std.shape, std.dtype)
    ),
    _aten.normal.Tensor_Tensor: lambda rng, mean, std, **_: (
        mean + std * rng.normal(torch.broadcast_shapes(mean.shape, std.shape), mean.dtype)
    ),
    _aten.exponential.default: _exponential,
}

# A backend that doesn't functionalise first shows these operations to a mode as they are.
IN_PLACE: dict[Any, Any] = {
    _aten.bernoulli_.float: _aten.bernoulli_.float,
    _aten.bernoulli_.Tensor: _aten.bernoulli.Tensor,
    _aten.exponential_.default: _aten.exponential.default,
    _aten.normal_.default: _aten.normal_functional.default,
    getattr(_aten.random_, "from"): getattr(_aten.random, "from"),
    _aten.random_.to: _aten.random.to,
    _aten.uniform_.default: _aten.uniform.default,
}
