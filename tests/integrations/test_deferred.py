"""A tensor that says that it is on the CPU; its value stays on the devices until it is read."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import spmdzero
from spmdzero.backend import runtime
from spmdzero.backend.hosts import processes
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations import DeferredTensor
from spmdzero.integrations._deferred import defer, undefer
from spmdzero.integrations._trainer import SummedLoss
from tests.support.bounds import assert_summed, summed
from tests.support.engines import reads

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

VALUES = torch.linspace(-1, 2, 24).reshape(4, 6)


@pytest.fixture(autouse=True)
def _spmd() -> None:
    runtime.start()


def on_devices(*, grad: bool = False) -> torch.Tensor:
    return (VALUES.to(runtime.device()) * 1).requires_grad_(grad)


def deferred(*, computes: bool = True) -> DeferredTensor:
    return DeferredTensor(on_devices(), computes=computes)


READS = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t.sum()),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy().tolist(),
    "asarray": lambda t: np.asarray(t).tolist(),
    "cpu": lambda t: t.cpu().tolist(),
    "repr": repr,
    "format": lambda t: f"{t.sum():.4f}",
    "bool": lambda t: bool(torch.isnan(t).any()),
    "tensor of them": lambda t: torch.tensor([t.sum(), t.mean()]).tolist(),
    "dlpack": lambda t: torch.from_dlpack(t).tolist(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)).tolist(),
    "save": lambda t: torch.load(_saved(t)).tolist(),
    "deepcopy": lambda t: copy.deepcopy(t).tolist(),
    "written": lambda t: torch.zeros(4, 6).add_(t).tolist(),
    "iterated": lambda t: [float(row.sum()) for row in t],
    "compared": lambda t: torch.equal(t, VALUES),
}


def _saved(tensor: torch.Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("computes", [True, False])
@pytest.mark.parametrize("name", READS)
def test_a_read_gives_what_a_tensor_on_the_cpu_gives(name: str, computes: bool) -> None:
    found, wanted = READS[name](deferred(computes=computes)), READS[name](VALUES)
    if isinstance(wanted, str | bool):
        assert found == wanted
    else:
        assert_summed(torch.tensor(found), torch.tensor(wanted))


def test_in_inference_mode_it_is_moved_and_cast_as_outside() -> None:
    value = deferred()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert value.to("meta", torch.float64).is_meta
            cast, dropped = value.to(torch.float64), F.dropout(value, 0.5, training=False)
            for made in (cast, dropped):
                assert isinstance(made, DeferredTensor)
                assert_summed(made.cpu(), VALUES.to(made.dtype))


@pytest.mark.parametrize("place", ["cpu", "cpu:0", torch.device("cpu", 0)])
def test_a_move_to_the_cpu_on_which_it_says_it_is_reads_nothing(place: Any) -> None:
    # LOCAL_RANK=0 makes clients' device cpu:0.
    leaf = on_devices(grad=True)
    value = defer(leaf * 2)
    before = reads()
    moved = value.to(place)
    cast = moved.to(place, torch.float64)
    assert reads() == before
    assert isinstance(moved, DeferredTensor)
    assert isinstance(cast, DeferredTensor)
    undefer(cast.sum()).backward()
    assert torch.equal(leaf.grad.cpu(), torch.full((4, 6), 2.0))


def test_nothing_is_read_before() -> None:
    tensor = deferred()
    before = reads()
    total = torch.tensor(0.0) + tensor.detach().mean() / 4
    total += tensor.sum()
    assert total.device.type == "cpu"
    assert isinstance(total, DeferredTensor)
    assert reads() == before
    assert total.item() == summed(float(VALUES.mean() / 4 + VALUES.sum()))
    assert reads() > before


def test_a_write_into_it_stays() -> None:
    for computes in (True, False):
        tensor = deferred(computes=computes)
        kept = tensor
        tensor -= tensor
        assert tensor is kept
        assert float(kept.abs().sum()) == 0
        kept[:, 0] = 3
        assert float(tensor.sum()) == 12


def test_writes_by_name_and_in_lists_stay() -> None:
    for computes in (True, False):
        tensor, into = deferred(computes=computes), torch.zeros(4, 6)
        torch.add(tensor, 1, out=into)
        assert torch.equal(into, VALUES + 1)
        torch._foreach_mul_([tensor], 0.0)
        assert float(tensor.abs().sum()) == 0


@pytest.mark.parametrize("computes", [True, False])
def test_a_new_shape_in_place_is_refused_in_words(computes: bool) -> None:
    with pytest.raises(SpmdZeroUsageError, match=r"changes the shape.*tensor\.cpu\(\)"):
        deferred(computes=computes).unsqueeze_(0)


# In torch, `.data = other` would be without effect, and the others end the process.
MEMORY: dict[str, Callable[[Any], Any]] = {
    ".data": lambda t: setattr(t, "data", VALUES),
    "apply_": lambda t: t.apply_(abs),
    "map_": lambda t: t.map_(VALUES, max),
    "share_memory_": lambda t: t.share_memory_(),
}


@pytest.mark.parametrize("computes", [True, False])
@pytest.mark.parametrize("name", MEMORY)
def test_what_needs_memory_of_its_own_is_refused_in_words(name: str, computes: bool) -> None:
    with pytest.raises(SpmdZeroUsageError, match=rf"{name}.*tensor\.cpu\(\)"):
        MEMORY[name](deferred(computes=computes))


def test_gradients_pass_a_read_by_cpu() -> None:
    theirs, own = VALUES.clone().requires_grad_(), on_devices(grad=True)
    (theirs.sum() + (theirs.cpu() ** 2).sum()).backward()
    logits = defer(own)
    on_host = logits.cpu()
    assert type(on_host) is torch.Tensor
    undefer(logits.sum() + (on_host**2).sum()).backward()
    assert own.grad is not None
    assert_summed(own.grad.cpu(), theirs.grad)


def test_gradients_of_a_loss_computed_with_labels_on_the_cpu() -> None:
    labels = torch.tensor([0, 5, 2, -100])
    theirs = VALUES.clone().requires_grad_()
    wanted = F.cross_entropy(theirs.view(-1, 6) * 2, labels)
    wanted.backward()

    own = on_devices(grad=True)
    logits = defer(own)
    before = reads()
    loss = F.cross_entropy(logits.view(-1, 6) * 2, labels)
    undefer(loss).backward()
    assert reads() == before
    assert own.grad is not None
    assert_summed(own.grad.cpu(), theirs.grad)
    assert loss.item() == summed(wanted.item())


def test_collectives_over_processes_read_and_write() -> None:
    processes.join()
    for computes in (True, False):
        tensor = deferred(computes=computes)
        gathered = [torch.zeros_like(tensor)]
        dist.all_gather(gathered, tensor)
        assert gathered[0].tolist() == VALUES.tolist()
        into = torch.empty(4, 6)
        dist.all_gather_into_tensor(into, tensor)
        assert torch.equal(into, VALUES)
        tensor.zero_()
        dist.broadcast(tensor, 0)
        assert float(tensor.abs().sum()) == 0


def test_it_is_formatted_once_an_engine_is_made_too() -> None:
    # An engine replaces how torch formats tensors, which those of a region need.
    spmdzero.initialize(model=torch.nn.Linear(6, 6), config={"train_batch_size": 8})
    assert f"{deferred().sum():.4f}" == f"{VALUES.sum():.4f}"


def test_a_sum_of_losses_is_gathered_by_a_read_of_each_and_no_operation_on_the_devices() -> None:
    processes.join()
    total = SummedLoss(share=lambda: 0.5, before_read=lambda: None)
    for value in (1.0, 2.0, math.inf):
        total += DeferredTensor(torch.tensor(value).to(runtime.device()) * 1, computes=True)
    before = reads()
    gathered = [torch.zeros(())]
    dist.all_gather(gathered, total)
    # A loss that is not finite counts as half of the sum before it.
    assert gathered[0].item() == 4.5
    assert reads() == before + 3


def test_what_needs_no_gradient_is_read_once_and_computed_on_the_cpu() -> None:
    tensor = deferred(computes=False)
    before = reads()
    shape = tuple(tensor.shape)
    assert (shape, reads()) == ((4, 6), before)
    largest = tensor.argmax(-1)
    assert type(largest) is torch.Tensor
    after = reads()
    assert after > before
    assert torch.equal(tensor.softmax(-1), VALUES.softmax(-1))
    assert reads() == after


# Of the values and of a mask, what a client's loss chooses by it.
CHOSEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index": lambda t, mask: t[mask],
    "index of a dim": lambda t, mask: t[:, mask[0]],
    "masked_select": torch.masked_select,
    "nonzero": lambda t, mask: t.flatten().index_select(0, mask.flatten().nonzero()[:, 0]),
    "where": lambda t, mask: t[torch.where(mask)],
    "put": lambda t, mask: torch.index_put(t, (mask,), t[~mask].sum() * torch.ones(())),
    "scatter": lambda t, mask: t.masked_scatter(mask, t.flip(0)),
}


@pytest.mark.parametrize("of_devices", [False, True])
@pytest.mark.parametrize("name", CHOSEN)
def test_what_a_mask_chooses_is_on_the_devices_with_its_gradient(
    name: str, of_devices: bool
) -> None:
    x, plain = on_devices(grad=True), VALUES.clone().requires_grad_()
    tensor = defer(x)
    mask = tensor.detach() > 0.5 if of_devices else VALUES > 0.5
    found, wanted = CHOSEN[name](tensor, mask), CHOSEN[name](plain, VALUES > 0.5)
    assert isinstance(found, DeferredTensor)
    assert found.shape == wanted.shape
    assert_summed(found.detach().cpu(), wanted.detach())
    undefer(found.square().sum()).backward()
    wanted.square().sum().backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert_summed(x.grad.cpu(), plain.grad)


def test_a_gradient_that_passes_is_differentiated_in_its_turn() -> None:
    found = []
    for cross in (lambda t: t, lambda t: undefer(defer(t).sin()), lambda t: defer(t).cpu()):
        x = on_devices(grad=True)
        (grad,) = torch.autograd.grad(cross(x).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), x)[0].cpu())
        plain = VALUES.clone().requires_grad_()
        inner = plain.sin() if len(found) == 2 else plain
        (grad,) = torch.autograd.grad(inner.pow(3).sum(), plain, create_graph=True)
        expected = torch.autograd.grad(grad.square().sum(), plain)[0]
        # The devices' sine is another polynomial than the CPU's, and its derivatives are summed.
        torch.testing.assert_close(found[-1], expected, rtol=1e-5, atol=1e-5)
