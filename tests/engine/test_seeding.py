"""`torch.manual_seed` after `initialize` reaches draws on the devices outside of the engine."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from spmdzero.backend import current
from spmdzero.compat.accelerator import get_accelerator
from spmdzero.errors import ReplicaRegionError
from tests.support.engines import Mean, start

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

SEEDS: dict[str, Callable[[int], object]] = {
    "torch.manual_seed": lambda seed: torch.manual_seed(seed),
    "torch.random.manual_seed": lambda seed: torch.random.manual_seed(seed),
    "get_accelerator().manual_seed": lambda seed: get_accelerator().manual_seed(seed),
    "get_accelerator().manual_seed_all": lambda seed: get_accelerator().manual_seed_all(seed),
}


def drawn(device: torch.device) -> torch.Tensor:
    ones = torch.ones(8, device=device)
    made = [torch.randn(8, device=device), torch.rand_like(ones), F.dropout(ones)]
    return torch.stack(made).cpu()


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_after_initialize_repeats_draws_on_the_devices(name: str) -> None:
    seed = SEEDS[name]
    engine = start(Mean())
    seed(7)
    first, more = drawn(engine.device), drawn(engine.device)
    seed(7)
    assert torch.equal(drawn(engine.device), first)
    assert not torch.equal(more, first)


def test_a_seed_that_nobody_chose_is_another_each_time() -> None:
    engine = start(Mean())
    torch.seed()
    first = drawn(engine.device)
    torch.seed()
    assert not torch.equal(drawn(engine.device), first)


Draw = Callable[[torch.device, torch.Generator], torch.Tensor]
BY_GENERATOR: dict[str, Draw] = {
    "rand": lambda d, g: torch.rand(4, 5, device=d, generator=g),
    "randn, bf16": lambda d, g: torch.randn(33, device=d, dtype=torch.bfloat16, generator=g),
    "randint": lambda d, g: torch.randint(3, 99, (9,), device=d, generator=g),
    "randperm": lambda d, g: torch.randperm(9, device=d, generator=g),
    "normal": lambda d, g: torch.normal(torch.arange(4.0, device=d), 2.0, generator=g),
    "multinomial": lambda d, g: torch.multinomial(torch.arange(9.0, device=d), 3, generator=g),
    "bernoulli": lambda d, g: torch.bernoulli(torch.full((9,), 0.5, device=d), generator=g),
    "bernoulli_": lambda d, g: torch.zeros(9, device=d).bernoulli_(0.3, generator=g),
    "uniform_ of a part": lambda d, g: torch.cat(
        [whole := torch.zeros(2, 20, device=d), whole[1].uniform_(generator=g)[None], whole]
    ),
    "random_": lambda d, g: torch.zeros(4, device=d).random_(9, generator=g),
    "init": lambda d, g: torch.nn.init.uniform_(torch.empty(4, 4, device=d), generator=g),
}
# torch_xla's tensors have no strides, and it has no kernels of the others.
BY_GENERATOR_ON_JAX: dict[str, Draw] = {
    "normal_ of a turned one": lambda d, g: torch.zeros(3, 4, device=d).t().normal_(generator=g),
    "exponential_": lambda d, g: torch.zeros(4, device=d).exponential_(generator=g),
    "log_normal_": lambda d, g: torch.zeros(4, device=d).log_normal_(generator=g),
    "poisson": lambda d, g: torch.poisson(torch.full((9,), 4.0, device=d), generator=g),
}


def test_a_draw_with_a_generator_has_its_numbers_on_the_cpu() -> None:
    device = start(Mean()).device
    draws = BY_GENERATOR | (BY_GENERATOR_ON_JAX if current().name == "jax" else {})
    for name, draw in draws.items():
        # One for the devices says that it is one of the CPU, as code does that makes noise for any.
        mine, theirs = torch.Generator(device=device), torch.Generator()
        assert mine.device == torch.device("cpu")
        for generator in (mine, theirs):
            generator.manual_seed(5)
        for _ in range(2):
            made, wanted = draw(device, mine), draw(torch.device("cpu"), theirs)
            assert (made.device, made.dtype) == (device, wanted.dtype), name
            assert torch.equal(made.cpu(), wanted), name
        assert torch.equal(mine.get_state(), theirs.get_state()), name


def test_generators_are_torchs_own() -> None:
    device = start(Mean()).device
    made = [torch.Generator(device), torch.Generator("cpu"), torch.Generator()]
    for generator in (*made, torch.default_generator, copy.deepcopy(made[0])):
        assert isinstance(generator, torch.Generator)
        assert type(generator) is torch._C.Generator
    assert not isinstance(device, torch.Generator)
    assert torch.equal(pickle.loads(pickle.dumps(made[0])).get_state(), made[0].get_state())
    with pytest.raises(RuntimeError, match="META device type not an accelerator"):
        torch.Generator("meta")


class Noisy(Mean):
    """Adds noise of a generator of its own in the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(device=x.device)
        return super().forward(x + torch.randn(x.shape, device=x.device, generator=generator))


def test_a_generator_in_a_forward_is_refused_at_its_line() -> None:
    engine = start(Noisy())
    with pytest.raises(ReplicaRegionError, match=r"test_seeding.py.*drive several replicas"):
        engine(torch.ones(engine.mesh.size, 4))
