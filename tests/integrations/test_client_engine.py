"""The engine that clients drive: rows of a process, any number of them, sums over items."""

import copy
import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spmdzero
from spmdzero.engine import release
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.integrations._initialize import config_of_devices, initialize_for_client
from tests.support.bounds import assert_summed, summed
from tests.support.engines import assert_trained_as, config
from tests.support.selected import product_rows

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

ROWS = 16


class Tokens(nn.Module):
    """transformers' form: labels, a sum divided by the items of a whole batch, logits beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None
    ) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(ids).tanh())
        kind = "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=kind)
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        return {"loss": loss, "logits": logits}


class Tied(Tokens):
    """The head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def test_errors_name_the_rows_that_the_client_counts() -> None:
    engine = initialize_for_client(
        model=Tokens(),
        config=config(train_micro_batch_size_per_gpu=ROWS, gradient_accumulation_steps=2),
    )[0]
    with pytest.raises(SpmdZeroUsageError, match="rows of a process here, 2 on each of its 8"):
        engine.train_batch(batch(3 * ROWS))
    engine.destroy()
    with pytest.raises(SpmdZeroConfigError, match=r"each of this process's 8 devices takes of.*16"):
        initialize_for_client(
            model=Tokens(),
            config=config(train_micro_batch_size_per_gpu=ROWS, train_batch_size=ROWS + 1),
        )


def test_tied_weights_are_one_tensor_in_a_state_dict() -> None:
    model = Tied()
    weight = model.embed.weight.detach().clone()
    engine = initialize_for_client(
        model=model,
        config_params=config(train_micro_batch_size_per_gpu=ROWS, optimizer={"type": "Adam"}),
    )[0]
    state = model.state_dict()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert torch.equal(state["head.weight"], weight)
    engine.destroy()


def batch(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Ids and labels `[rows, 6]`, a different number of labels in each row."""
    torch.manual_seed(seed)
    ids = torch.randint(0, 11, (rows, 6))
    kept = torch.arange(6) < torch.randint(1, 7, (rows, 1))
    return {"ids": ids, "labels": torch.where(kept, ids, -100)}


def both(
    *, kind: type[nn.Module] = Tokens, **more: Any
) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = kind()
    theirs = copy.deepcopy(model)
    settings = config(
        train_micro_batch_size_per_gpu=ROWS,
        optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        spmd={"min_shard_elements": 16},
        **more,
    )
    engine = initialize_for_client(model=model, config_params=settings)[0]
    return engine, theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0)


def items(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return inputs["labels"].ne(-100).sum()


# The first batch is short, and two can't be shared equally by the 8 devices.
@pytest.mark.parametrize("sizes", [(16, 16, 16, 16, 5, 16), (8, 16, 3, 16)])
def test_a_sum_over_items_trains_as_on_one_device(sizes: tuple[int, ...]) -> None:
    engine, theirs, adam = both()
    for seed, rows in enumerate(sizes):
        inputs = batch(rows, seed)
        inputs["num_items_in_batch"] = items(inputs)
        loss = engine(**inputs)["loss"]
        engine.backward(loss)
        engine.step()
        wanted = theirs(**inputs)["loss"]
        wanted.backward()
        adam.step()
        adam.zero_grad()
        # fp32 sums in another order.
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert_trained_as(engine, theirs)


@pytest.mark.parametrize("move", [lambda loss: loss.to("cpu:0"), torch.Tensor.cpu])
def test_a_loss_that_was_moved_to_the_cpu_trains(move: Any) -> None:
    # TRL's trainers do so with their device, which is cpu:0 under LOCAL_RANK.
    engine, theirs, adam = both()
    inputs = batch(ROWS)
    loss = move(engine(**inputs, num_items_in_batch=items(inputs))["loss"])
    assert loss.device == torch.device("cpu")
    engine.backward(loss)
    engine.step()
    theirs(**inputs, num_items_in_batch=items(inputs))["loss"].backward()
    adam.step()
    assert_trained_as(engine, theirs)


class Placed(Tokens):
    """`Tokens` with an input before the others that is no batch."""

    def forward(  # pyrefly: ignore[bad-override]
        self, scale: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor,
        num_items_in_batch: Any = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        return super().forward(ids, labels, num_items_in_batch)


@pytest.mark.parametrize(
    ("rows", "by_place"), product_rows([16, 5], [False, True], quick={(16, True), (5, False)})
)
def test_items_are_a_replicas_whatever_else_is_given_and_how(rows: int, by_place: bool) -> None:
    engine, theirs, _ = both(kind=Placed)
    inputs = {"scale": torch.ones(1, 6)} | batch(rows)
    inputs["num_items_in_batch"] = items(inputs)
    wanted = theirs(**inputs)["loss"]
    found = (engine(*inputs.values()) if by_place else engine(**inputs))["loss"]
    # fp32 sums in another order.
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


class Recomputed(Tokens):
    """Its hidden layer runs again in backward."""

    def forward(  # pyrefly: ignore[bad-override]
        self, ids: torch.Tensor
    ) -> torch.Tensor:
        return self.head(checkpoint(lambda ids: self.embed(ids).tanh(), ids, use_reentrant=False))


def test_what_a_client_writes_into_an_output_of_a_model_that_recomputes_trains() -> None:
    # As preference losses leave out the tokens that are no answer's.
    engine, theirs, adam = both(kind=Recomputed)
    inputs = batch(ROWS)
    kept = inputs["labels"] != -100

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        chosen = logits.log_softmax(-1).gather(-1, inputs["ids"][..., None])[..., 0]
        chosen[~kept] = 0
        return -chosen.sum(-1).mean()

    loss, wanted = loss_of(engine(inputs["ids"])), loss_of(theirs(inputs["ids"]))
    engine.backward(loss)
    engine.step()
    wanted.backward()
    adam.step()
    assert loss.item() == summed(wanted.item())
    assert_trained_as(engine, theirs)


def test_an_output_is_an_input_again_with_its_gradient() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    theirs, x = copy.deepcopy(model), torch.randn(ROWS, 6)
    engine = initialize_for_client(model=model, config=config(train_micro_batch_size_per_gpu=ROWS))[
        0
    ]
    with torch.no_grad():
        assert_summed(engine(engine(x)).cpu(), theirs(theirs(x)))
        assert_summed(engine.module(engine.module(x)).cpu(), theirs(theirs(x)))
    engine.backward(engine(engine(x)).square().mean())
    theirs(theirs(x)).square().mean().backward()
    for own, other in zip(engine.module.parameters(), theirs.parameters(), strict=True):
        # fp32 sums in another order.
        found = spmdzero.utils.safe_get_full_grad(own).cpu()
        torch.testing.assert_close(found, other.grad, rtol=1e-5, atol=1e-7)


def test_a_loss_is_formatted_as_a_number() -> None:
    engine, theirs, _ = both()
    wanted = theirs(**batch(5))["loss"]
    assert f"{engine(**batch(5))['loss']:.3f}" == f"{wanted:.3f}"


def test_a_loss_computed_from_logits_with_labels_on_the_cpu() -> None:
    engine, theirs, adam = both()
    for seed, rows in enumerate((16, 16, 16, 16, 7)):
        inputs = batch(rows, seed)
        labels = inputs["labels"].flatten()
        loss = F.cross_entropy(engine(**inputs)["logits"].flatten(0, 1), labels)
        engine.backward(loss)
        engine.step()
        wanted = F.cross_entropy(theirs(**inputs)["logits"].flatten(0, 1), labels)
        wanted.backward()
        adam.step()
        adam.zero_grad()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert_trained_as(engine, theirs)


class Pairs(nn.Module):
    """A reward model: the second half of the rows are answers that the first half's are above."""

    def __init__(self) -> None:
        super().__init__()
        # A bias of all rewards has no gradient but for rounding.
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 1, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        rewards = self.head(self.body(x).tanh())[:, 0]
        chosen, rejected = rewards.chunk(2)
        margins = chosen - rejected
        return {"loss": -F.logsigmoid(margins).mean(), "rewards": rewards, "margins": margins}


def loss_outside(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    chosen, rejected = outputs["rewards"].chunk(2)
    return F.softplus(rejected - chosen).mean()


# A loader of 16 rows, of which a forward joins two batches. Then an epoch's ends: of eight pairs,
# and of five, which 8 devices can't share.
JOINED = (32, 32, 32, 16, 10)


@pytest.mark.parametrize(
    "loss_of", [operator.itemgetter("loss"), pytest.param(loss_outside, marks=pytest.mark.slow)]
)
def test_batches_that_a_client_joins_are_paired_and_train_as_on_one_device(loss_of: Any) -> None:
    engine, theirs, adam = both(kind=Pairs)
    for seed, rows in enumerate(JOINED):
        torch.manual_seed(seed)
        x = torch.randn(rows, 6)
        found, wanted = engine(x), theirs(x)
        loss = loss_of(found)
        engine.backward(loss)
        engine.step()
        for name in ("rewards", "margins"):
            # fp32 sums in another order.
            ours = found[name].detach().cpu()
            torch.testing.assert_close(ours, wanted[name].detach(), rtol=1e-5, atol=1e-6)
        assert loss.item() == pytest.approx(loss_of(wanted).item(), rel=1e-5)
        loss_of(wanted).backward()
        adam.step()
        adam.zero_grad()
    assert_trained_as(engine, theirs)
    engine.eval()
    with torch.no_grad():
        # As many as a batch of the loader has, which are the rows of eight pairs here.
        x = torch.randn(ROWS, 6)
        found, wanted = engine(x)["margins"].cpu(), theirs(x)["margins"]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_rows_that_are_no_multiple_of_the_loaders_train_on_every_device_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, theirs, _ = both(kind=Pairs)
    x = torch.randn(24, 6)
    with caplog.at_level("WARNING", "spmdzero"):
        loss = engine(x)["loss"]
    assert loss.item() == pytest.approx(theirs(x)["loss"].item(), rel=1e-5)
    assert "24 rows, where a batch of the loader has 16" in caplog.text
    assert "per_device_train_batch_size" in caplog.text


@pytest.mark.parametrize("rows", [16, 24, 5])
def test_the_module_called_by_itself_evaluates_as_on_one_device(rows: int) -> None:
    engine, theirs, _ = both()
    engine.eval()
    inputs = batch(rows)
    with torch.no_grad():
        ours, wanted = engine.module(**inputs), theirs(**inputs)
        by_engine = engine(**inputs)
    assert float(ours["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)
    for found in (ours, by_engine):
        torch.testing.assert_close(found["logits"].cpu(), wanted["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("take_off", [nn.Module.cpu, release], ids=["cpu()", "zero_to_fp32"])
def test_a_module_that_was_taken_off_the_devices_is_plain_torch(take_off: Any) -> None:
    engine, theirs, _ = both()
    take_off(engine.module)
    found = engine.module(**batch(5))
    assert type(found["loss"]) is torch.Tensor
    assert torch.equal(found["loss"], theirs(**batch(5))["loss"])
    # `cpu()` moves it to a client's device, from which it comes back; zero_to_fp32 ends the engine.
    if take_off is nn.Module.cpu:
        ours, wanted = (made(**batch(ROWS))["logits"] for made in (engine, theirs))
        torch.testing.assert_close(ours.cpu(), wanted, rtol=1e-5, atol=1e-6)
        return
    with pytest.raises(SpmdZeroUsageError, match=r"embed\.weight.*initialize"):
        engine(**batch(ROWS))


def test_dropout_of_rows_that_cant_be_shared_is_that_of_one_device() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = F.dropout(self.line(x), 0.5)
            return out.square().mean(), out

    engine = initialize_for_client(
        model=Dropped(), config=config(train_micro_batch_size_per_gpu=ROWS)
    )[0]
    loss, out = engine(torch.randn(3, 4))
    # A mean of the replicas' masks would leave next to no zeros.
    assert 0.3 < float((out == 0).float().mean()) < 0.7
    assert loss.item() == pytest.approx(out.square().mean().item(), rel=1e-5)


def test_rows_of_a_process_that_the_devices_cant_share_are_refused() -> None:
    with pytest.raises(SpmdZeroConfigError, match=r"12.*rows of a process.*8.*Take 8"):
        config_of_devices({"train_micro_batch_size_per_gpu": 12})


def test_an_engine_that_only_evaluates_takes_any_number_of_rows() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    plain, x = copy.deepcopy(model), torch.randn(5, 4)
    # What accelerate fills in for a reference model that is prepared without a loader.
    rows = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 1}
    engine, *_ = initialize_for_client(
        model=model, config={**rows, "zero_optimization": {"stage": 3}}
    )
    engine.eval()
    with torch.no_grad():
        for count in (1, 5):
            torch.testing.assert_close(engine(x[:count]).read(), plain(x[:count]))
    with pytest.raises(SpmdZeroConfigError, match="its 8 devices can't share"):
        initialize_for_client(
            model=plain, optimizer=torch.optim.SGD(plain.parameters()), config=rows
        )


def test_the_rest_of_a_clients_config_stays() -> None:
    given = {
        "train_micro_batch_size_per_gpu": 16,
        "train_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "steps_per_print": float("inf"),
    }
    made = config_of_devices(given)
    assert made == {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 64,
        "gradient_accumulation_steps": 4,
    }
    assert given["train_micro_batch_size_per_gpu"] == 16


def test_an_average_on_the_cpu_follows_parameters_on_the_devices() -> None:
    # accelerator.device is the CPU, where diffusers' EMAModel puts its average.
    rows = config(train_micro_batch_size_per_gpu=ROWS)
    engine = initialize_for_client(model=Tokens(), config=rows)[0]
    parameters = dict(engine.module.named_parameters())
    now = {name: parameter.detach().cpu() for name, parameter in parameters.items()}
    average = {name: torch.zeros_like(value) for name, value in now.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            average[name].sub_(0.5 * (average[name] - parameter))
            assert average[name].device.type == "cpu"
            assert torch.equal(average[name], now[name] / 2)


def _cached_step(
    model: Any, parts: tuple[torch.Tensor, ...], *, backward: Any, where: torch.device
) -> torch.Tensor:
    """A contrastive loss of all rows by gradient caching, as sentence-transformers computes it."""
    with torch.no_grad():
        cached = [model(part).detach().requires_grad_() for part in parts]
    rows = torch.cat([each.to(where) for each in cached])
    with torch.enable_grad():
        loss = F.cross_entropy(rows @ rows.T / 4, torch.arange(len(rows), device=where))
        loss.backward()
    loss = loss.detach().requires_grad_()

    def run_again(grad: torch.Tensor) -> None:
        for part, kept in zip(parts, cached, strict=True):
            with torch.enable_grad():
                surrogate = (model(part) * kept.grad).sum() * grad
                surrogate.backward()

    loss.register_hook(run_again)
    backward(loss)
    return loss


@pytest.mark.parametrize(("client", "accumulation"), [(True, 2), (False, 1)])
def test_gradient_caching_trains_as_plain_torch(client: bool, accumulation: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    settings = config(
        train_micro_batch_size_per_gpu=ROWS if client else ROWS // 8,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.0,
    )
    make = initialize_for_client if client else spmdzero.initialize
    engine = make(model=model, config=settings)[0]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    where = torch.device("cpu") if client else engine.device
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(accumulation):
            parts = torch.randn(2 * ROWS, 6).split(ROWS)
            ours = _cached_step(engine, parts, backward=engine.backward, where=where)
            engine.step()
            theirs = _cached_step(
                plain,
                parts,
                backward=lambda loss: (loss / accumulation).backward(),
                where=torch.device("cpu"),
            )
            # A mean of 32 fp32 numbers, summed in another order.
            assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
        optimizer.step()
    assert engine.global_steps == 4
    assert_trained_as(engine, plain)


def test_a_cached_loss_that_a_client_has_divided_trains() -> None:
    # transformers' Trainer divides by the accumulation, sentence-transformers' adds up parts.
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    plain = copy.deepcopy(model)
    settings = config(
        train_micro_batch_size_per_gpu=ROWS, gradient_accumulation_steps=2, gradient_clipping=0.0
    )
    engine = initialize_for_client(model=model, config=settings)[0]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    host = torch.device("cpu")

    def divided(loss: torch.Tensor) -> torch.Tensor:
        return torch.stack([loss, torch.zeros(())]).sum() / 2

    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            parts = torch.randn(2 * ROWS, 6).split(ROWS)
            _cached_step(
                engine,
                parts,
                backward=lambda loss: engine.backward(divided(loss), scale_wrt_gas=False),
                where=host,
            )
            engine.step()
            _cached_step(plain, parts, backward=lambda loss: divided(loss).backward(), where=host)
        optimizer.step()
    assert_trained_as(engine, plain)


def test_a_loss_without_a_way_back_to_the_model_says_so() -> None:
    engine = initialize_for_client(
        model=nn.Linear(4, 1), config=config(train_micro_batch_size_per_gpu=ROWS)
    )[0]
    with torch.no_grad():
        loss = engine(torch.randn(ROWS, 4)).mean()
    with pytest.raises(SpmdZeroUsageError, match="detached, or computed under torch"):
        engine.backward(loss.detach().requires_grad_())


def test_an_evaluation_of_rows_of_many_lengths_is_not_told_how_to_generate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = initialize_for_client(
        model=Tokens(), config=config(train_micro_batch_size_per_gpu=ROWS)
    )[0]
    module = engine.module.eval()
    with torch.no_grad():
        for length in (3, 4, 5, 6):
            ids = torch.zeros(ROWS, length, dtype=torch.int64)
            module(ids, labels=ids)["loss"].item()
    assert "third shape" not in caplog.text


def test_more_rows_than_a_batch_are_no_short_batch(caplog: pytest.LogCaptureFixture) -> None:
    # sentence-transformers embeds columns that are alike together.
    engine = initialize_for_client(
        model=nn.Linear(4, 1), config=config(train_micro_batch_size_per_gpu=ROWS)
    )[0]
    for rows in (ROWS, 2 * ROWS):
        engine.backward(engine(torch.randn(rows, 4)).mean())
        engine.step()
    assert "rows instead of" not in caplog.text
