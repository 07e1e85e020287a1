"""Operations of models on the devices, forward and backward, beside torch's on the CPU."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import spmdzero
from spmdzero.backend import Mesh, programs
from spmdzero.backend.jax.lazy import _decompose
from spmdzero.backend.jax.lazy._python import mixing
from tests.support.bounds import assert_rounded, assert_summed

DEVICE = torch.device("xla", 0)
IMAGE = torch.linspace(-1, 1, 2 * 3 * 5 * 6).reshape(2, 3, 5, 6).sin()
GRID = (torch.linspace(-7, 7, 2 * 4 * 3 * 2).cos() * 1.2).reshape(2, 4, 3, 2)
ROWS = torch.linspace(-3, 3, 7 * 5).sin().reshape(7, 5)
TABLE = torch.linspace(0, 9, 6 * 4).cos().reshape(6, 4)
TALL = torch.linspace(0, 5, 12).sin().reshape(4, 3) + torch.eye(4, 3)

Inputs = tuple[torch.Tensor, ...]
# name -> a function, what it is differentiated by, and its other inputs.
CASES: dict[str, tuple[Callable[..., torch.Tensor], Inputs, Inputs]] = {
    "grid_sample, bilinear": (
        lambda x, g: F.grid_sample(x, g, padding_mode="border", align_corners=False),
        (IMAGE, GRID),
        (),
    ),
    "grid_sample, bicubic": (
        lambda x, g: F.grid_sample(x, g, "bicubic", "reflection", align_corners=True),
        (IMAGE, GRID),
        (),
    ),
    "interpolate": (
        lambda x: F.interpolate(x, (3, 4), mode="bicubic", antialias=True),
        (IMAGE,),
        (),
    ),
    "embedding_bag": (
        lambda w, i, o: F.embedding_bag(i, w, o, mode="max"),
        (TABLE,),
        (torch.tensor([1, 5, 0, 1, 3]), torch.tensor([0, 2, 2])),
    ),
    "embedding_bag, weighted": (
        lambda w, p, i: F.embedding_bag(i, w, per_sample_weights=p, mode="sum", padding_idx=1),
        (TABLE, ROWS[:2, :3].contiguous()),
        (torch.tensor([[1, 5, 0], [1, 3, 3]]),),
    ),
    "ctc_loss": (
        lambda x, t: F.ctc_loss(x.log_softmax(2), t, (5, 6), (2, 3)),
        (torch.linspace(-3, 3, 6 * 2 * 4).sin().reshape(6, 2, 4),),
        (torch.tensor([[1, 1, 0], [1, 2, 3]]),),
    ),
    "ctc_loss of lengths on the devices": (
        lambda x, t, n, m: F.ctc_loss(x.log_softmax(2), t, n, m, zero_infinity=True),
        (torch.linspace(-3, 3, 6 * 2 * 4).sin().reshape(6, 2, 4),),
        (torch.tensor([1, 1, 1, 2, 3]), torch.tensor([2, 6]), torch.tensor([2, 3])),
    ),
    "multi_margin_loss": (
        lambda x, t: F.multi_margin_loss(x, t, p=2),
        (ROWS,),
        (torch.tensor([0, 4, 2, 2, 1, 3, 0]),),
    ),
    "multilabel_margin_loss": (
        F.multilabel_margin_loss,
        (ROWS[:2],),
        (torch.tensor([[3, 0, -1, 1, 2], [4, -1, 0, 0, 0]]),),
    ),
    "pdist": (lambda x: F.pdist(x, 3.0), (ROWS,), ()),
    "masked_scatter": (
        lambda x, y: x.masked_scatter(x > 0.2, y),
        (ROWS, ROWS.flip(0).contiguous()),
        (),
    ),
    "lstsq": (lambda a, b: torch.linalg.lstsq(a, b).solution, (TALL, TALL[:, :2].cos()), ()),
    "pinv": (torch.linalg.pinv, (TALL,), ()),
    "cholesky": (lambda a: torch.linalg.cholesky(a.mT @ a), (TALL,), ()),
    "inv": (lambda a: torch.linalg.inv(a.mT @ a), (TALL,), ()),
    "solve": (lambda a, b: torch.linalg.solve(a.mT @ a, b[:3]), (TALL, TALL[:, :2].cos()), ()),
    "matrix_norm": (lambda a: torch.linalg.matrix_norm(a, 2), (TALL,), ()),
    "rrelu": (lambda x: F.rrelu(x, training=False), (ROWS,), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_torchs_with_its_gradients(mesh: Mesh, name: str) -> None:
    function, differentiated, others = CASES[name]
    found = []
    for device in (DEVICE, torch.device("cpu")):
        inputs = [tensor.to(device).requires_grad_() for tensor in differentiated]
        made = function(*inputs, *(tensor.to(device) for tensor in others))
        factors = torch.linspace(0.5, 1.5, made.numel()).reshape(made.shape).to(device)
        gradients = torch.autograd.grad((made * factors).sum(), inputs)
        found.append([tensor.detach().cpu() for tensor in (made, *gradients)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)


def test_what_is_asked_of_all_elements_is_answered_on_the_host(mesh: Mesh) -> None:
    x = ROWS.to(DEVICE)
    assert torch.allclose(x, x + 1e-9)
    assert not torch.allclose(x, x + 1)
    assert torch.equal(torch.histc(x, 4, -1, 1).cpu(), torch.histc(ROWS, 4, -1, 1))


# What names one place in each row, of rows that the devices share.
ROW_BY_ROW: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross entropy": F.cross_entropy,
    "gather": lambda x, at: x.gather(1, at[:, None]).square().sum(),
    "scatter": lambda x, at: x.scatter(1, at[:, None], 2.0).square().sum(),
    "scatter_add": lambda x, at: x.scatter_add(1, at[:, None], x[:, :1]).square().sum(),
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_devices_keep_their_rows(mesh: Mesh, name: str) -> None:
    rows, targets = torch.linspace(-3, 3, 16 * 5).sin().reshape(16, 5), torch.arange(16) * 3 % 5
    x = mesh.place(rows, mesh.batch_spec(2)).requires_grad_()
    ROW_BY_ROW[name](x, mesh.place(targets, mesh.batch_spec(1))).backward()
    assert x.grad is not None
    ledger = spmdzero.CollectiveLedger.from_hlo(programs.optimized_hlo([x.grad]))
    assert not [c for c in ledger.collectives if c.kind != "all-reduce"]
    host = rows.clone().requires_grad_()
    ROW_BY_ROW[name](host, targets).backward()
    assert_summed(x.grad.cpu(), host.grad)


def test_rrelu_draws_slopes_that_its_gradient_has(mesh: Mesh) -> None:
    x = torch.full((64,), -2.0).to(DEVICE).requires_grad_()
    out = F.rrelu(x, 0.1, 0.4, training=True)
    out.sum().backward()
    slopes = out.detach().cpu() / -2
    assert x.grad is not None
    assert_rounded(x.grad.cpu(), slopes)
    assert slopes.min() >= 0.1
    assert slopes.max() <= 0.4
    assert len(set(slopes.tolist())) > 32


def test_isin_of_one_number_reduces_no_dim() -> None:
    # As `generate` of transformers asks whether a token that ends is the padding.
    tokens, pad = torch.tensor([3, 5]), torch.tensor(5)
    found = torch.isin(tokens.to(DEVICE), pad.to(DEVICE))
    assert found.cpu().tolist() == [False, True]


def test_tensors_of_two_devices_are_told_where_to_go(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A client's engine, as an earlier test has it, allows them for its process.
    monkeypatch.setattr(mixing, "is_allowed", False)
    found, labels = torch.ones(8, 3, device=DEVICE), torch.zeros(8)
    for mixed in (
        lambda: found.argmax(1) == labels,
        lambda: labels.eq(found.argmax(1)),
        lambda: torch.cat([found[0], labels]),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same") as caught:
            mixed()
        *_, told = str(caught.value).splitlines()
        assert re.match(rf"{re.escape(__file__)}:\d+: .*shape \[8\] there, \.to\(engine\.dev", told)


class _Airy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.airy_ai(self.line(x)).mean()


def test_an_operation_without_an_entry_and_its_line_are_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = spmdzero.initialize(model=_Airy(), config=config)
    for installed, fix in ((True, 'operations, or set "spmd": {"backend": "torch_xla"}'),
                           (False, "Write it with other operations")):  # fmt: skip
        monkeypatch.setattr(_decompose, "torch_xla_is_kept_out", lambda found=installed: found)
        with pytest.raises(spmdzero.ReplicaRegionError) as caught:
            engine(torch.ones(8, 4))
        said = str(caught.value)
        assert said.count("airy_ai") == said.count(__file__) == 1
        assert said.endswith(fix)


def test_a_trained_parameter_is_shown_as_one_parameter() -> None:
    config = {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = spmdzero.initialize(model=torch.nn.Linear(4, 1), config=config)
    plain = torch.nn.Parameter(torch.ones(2, device=DEVICE))
    for parameter in (engine.module.weight, plain):
        assert repr(parameter).count("Parameter containing:\ntensor(") == 1
        assert repr(parameter).count("Parameter") == 1
