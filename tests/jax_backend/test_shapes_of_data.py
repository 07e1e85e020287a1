"""Operations whose shape depends on data, outside of the region: the values are read."""

import copy
from collections.abc import Callable

import pytest
import torch

from spmdzero.backend import Mesh, runtime, tracing_only
from spmdzero.backend.jax import lowering
from spmdzero.errors import ReplicaRegionError
from tests.support.engines import start

Function = Callable[[torch.Tensor], torch.Tensor]
X = torch.tensor([[3.0, -1.0, 2.0], [0.0, 4.0, -5.0]])
FUNCTIONS: dict[str, Function] = {
    "a mask": lambda x: x[x > 1],
    "a mask of rows": lambda x: x[x.sum(1) > 0],
    "a mask behind a slice": lambda x: x[:, x[0] > 0],
    "a mask that chooses nothing": lambda x: x[x > 9],
    "masked_select": lambda x: x.masked_select(x > 1),
    "nonzero": lambda x: x.nonzero(),
    "where with one argument": lambda x: torch.where(x > 1)[1],
    "argwhere": lambda x: torch.argwhere(x > 1),
    "repeat_interleave": lambda x: x.repeat_interleave(x[:, 0].long(), dim=0),
    "unique": lambda x: torch.unique(x.sign()),
    "unique_consecutive": lambda x: torch.unique_consecutive(x.sign(), return_counts=True)[1],
    "bincount": lambda x: torch.bincount(x.abs().long().flatten()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_shape_of_data_is_that_of_torch(name: str, mesh: Mesh) -> None:
    found = FUNCTIONS[name](X.to(runtime.device()))
    torch.testing.assert_close(found.cpu(), FUNCTIONS[name](X), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["a mask", "a mask behind a slice", "masked_select"])
def test_a_gradient_passes_through_it(name: str, mesh: Mesh) -> None:
    grads = list[torch.Tensor]()
    for device in (torch.device("cpu"), runtime.device()):
        x = X.to(device, copy=True).requires_grad_()
        (FUNCTIONS[name](x) ** 2).sum().backward()
        assert x.grad is not None
        grads.append(x.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


def test_what_has_no_values_yet_is_refused_with_what_to_write(mesh: Mesh) -> None:
    with tracing_only():
        x = mesh.zeros((8, 3), torch.float32, ("fsdp", None))
        lowering.placeholders().stand_for([x])
        with pytest.raises(ReplicaRegionError, match=r"depends on data.*Use torch\.where"):
            x[x > 1]


def test_a_loss_of_what_a_mask_chooses_trains_as_torch(mesh: Mesh) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    plain = copy.deepcopy(model)
    engine, adamw = start(model), torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(3):
        # Another number of rows at each step.
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        wanted = plain(x)[x[:, 0] > 0].square().mean()
        adamw.zero_grad()
        wanted.backward()
        adamw.step()
        found = engine(x)[(x[:, 0] > 0).to(runtime.device())].square().mean()
        engine.backward(found)
        engine.step()
        # fp32: sums in another order.
        assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
