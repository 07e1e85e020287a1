"""How a model comes to the devices: from the CPU, the XLA device, or the meta device."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import spmdzero
from spmdzero.backend import Mesh
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import Role
from tests.support.contract import GPT, make_batch, make_model
from tests.support.engines import config, three_calls

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

Values = dict[str, torch.Tensor]


def losses(engine: spmdzero.Engine) -> list[float]:
    return [three_calls(engine, make_batch(step, 0)).item() for step in range(2)]


def on_meta() -> GPT:
    with torch.device("meta"):
        return GPT()


@pytest.fixture(scope="module")
def values() -> Values:
    return {name: p.detach().clone() for name, p in make_model().named_parameters()}


@pytest.fixture(scope="module")
def from_cpu() -> list[float]:
    engine, *_ = spmdzero.initialize(model=make_model(), config=config())
    return losses(engine)


def one_file(values: Values, folder: Path) -> Path:
    save_file(values, folder / "model.safetensors")
    return folder / "model.safetensors"


def a_folder(values: Values, folder: Path) -> Path:
    one_file(values, folder)
    return folder


def an_index(values: Values, folder: Path) -> Path:
    halves = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, value) in enumerate(values.items()):
        halves["ab"[i % 2] + ".safetensors"][name] = value
    for file, half in halves.items():
        save_file(half, folder / file)
    found = {name: file for file, half in halves.items() for name in half}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": found}))
    return index


def a_folder_with_an_index(values: Values, folder: Path) -> Path:
    return an_index(values, folder).parent


def a_function(values: Values, folder: Path) -> Callable[[str], torch.Tensor]:
    return values.__getitem__


@pytest.mark.parametrize(
    "source", [one_file, a_folder, an_index, a_folder_with_an_index, a_function]
)
def test_a_meta_model_trains_as_the_one_built_on_the_cpu(
    source: Callable[[Values, Path], Any], values: Values, from_cpu: list[float], tmp_path: Path
) -> None:
    model = on_meta()
    engine, *_ = spmdzero.initialize(model=model, config=config(), weights=source(values, tmp_path))
    assert losses(engine) == from_cpu


def test_a_model_built_on_the_xla_device_trains_as_the_one_built_on_the_cpu(
    mesh: Mesh, values: Values, from_cpu: list[float]
) -> None:
    with torch.device("xla"):
        model = GPT()
    assert {p.device.type for p in model.parameters()} == {"xla"}
    engine, *_ = spmdzero.initialize(model=model, config=config(), weights=values.__getitem__)
    assert losses(engine) == from_cpu


def test_random_weights_drawn_on_the_xla_device_are_the_same_on_every_device(
    mesh: Mesh,
) -> None:
    with torch.device("xla"):
        model = nn.Linear(64, 64)
    engine, *_ = spmdzero.initialize(model=model, config=config())
    copies = spmdzero.local_shards(engine.module.weight)
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    assert copies[0].std() > 0.01


def test_states_of_a_meta_model_are_born_as_shards(values: Values) -> None:
    engine, *_ = spmdzero.initialize(
        model=on_meta(), config=config(bf16={"enabled": True}), weights=values.__getitem__
    )
    planned, measured = engine.plan.memory(), spmdzero.measure(engine)
    for role in (Role.PARAMETER, Role.MASTER, Role.MOMENT):
        assert measured[role] == planned[role] > 0
    weight = engine.module.wte.weight
    masters = spmdzero.local_shards(engine.optimizer.state[weight]["master"])
    rows = values["wte.weight"].bfloat16().float().chunk(8)
    assert all(torch.equal(m, row) for m, row in zip(masters, rows, strict=True))


def test_weights_also_replace_those_of_a_model_that_has_some(tmp_path: Path) -> None:
    wanted = {"weight": torch.full((3, 4), 2.0), "bias": torch.zeros(3)}
    engine, *_ = spmdzero.initialize(
        model=nn.Linear(4, 3), config=config(), weights=one_file(wanted, tmp_path)
    )
    assert torch.equal(engine.module.weight.detach().cpu(), wanted["weight"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("table", torch.ones(3), persistent=False)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_tied_weights_stay_tied_and_a_file_may_hold_either_name(name: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Tied()
    model.table = torch.full((3,), 5.0)
    stored = {name: torch.arange(128.0).reshape(16, 8), "scale": torch.tensor([3.0, 4.0])}
    engine, *_ = spmdzero.initialize(
        model=model, config=config(), weights=one_file(stored, tmp_path)
    )
    assert engine.module.head.weight is engine.module.embed.weight
    assert torch.equal(engine.module.embed.weight.detach().cpu(), stored[name])
    assert engine.module.scale.tolist() == [3.0, 4.0]
    # No file keeps it, so it keeps its own value.
    assert engine.module.table.tolist() == [5.0] * 3


def test_an_optimizer_made_on_meta_parameters_trains_them() -> None:
    model = nn.Linear(64, 64, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = spmdzero.initialize(
        model=model,
        optimizer=optimizer,
        config=config(optimizer=None, zero_allow_untested_optimizer=True, gradient_clipping=0.0),
        weights={"weight": torch.eye(64), "bias": torch.zeros(64)}.__getitem__,
    )
    engine.backward(engine(torch.ones(8, 64)).sum() / 8)
    engine.step()
    assert torch.equal(engine.module.weight.detach().cpu(), torch.eye(64) - 1)


def test_a_function_is_asked_for_one_tensor_at_a_time() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, device="meta") for _ in range(6)))
    alive: list[str] = []
    most = 0

    def make(name: str) -> torch.Tensor:
        nonlocal most
        tensor = torch.zeros(dict(model.named_parameters())[name].shape)
        alive.append(name)
        most = max(most, len(alive))
        weakref.finalize(tensor.untyped_storage(), alive.remove, name)
        return tensor

    spmdzero.initialize(model=model, config=config(), weights=make)
    assert most <= 2


def assert_refused(said: str, weights: Any = None, model: nn.Module | None = None) -> None:
    model = nn.Linear(4, 3, device="meta") if model is None else model
    with pytest.raises(SpmdZeroUsageError, match=said):
        spmdzero.initialize(model=model, config=config(), weights=weights)


class TestRefused:
    def test_a_meta_model_without_weights(self) -> None:
        assert_refused(r"h\.0\.ln_1.* and 24 more on the meta.*weigh", model=on_meta())

    def test_a_file_that_lacks_a_tensor_or_has_a_stranger(self, tmp_path: Path) -> None:
        path = one_file({"weight": torch.ones(3, 4), "other": torch.ones(1)}, tmp_path)
        assert_refused(r"lacks bias of the model.*has no other\. ", path)

    def test_a_meta_buffer_that_no_file_keeps(self, tmp_path: Path) -> None:
        with torch.device("meta"):
            model = Tied()
        path = one_file({"embed.weight": torch.ones(16, 8), "scale": torch.ones(2)}, tmp_path)
        assert_refused(r"lacks table .*persistent=False\) on the CPU", path, model)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (torch.ones(2), r"weight is \[2\], in the model it is \[3, 4"),
            (None, r"weights\('weight'\) returned NoneType"),
            (torch.ones(3, 4, device="meta"), r"weights\('weight'\) returned a meta tensor"),
        ],
    )
    def test_a_function_that_returns_another_shape_or_no_value(
        self, given: torch.Tensor | None, said: str
    ) -> None:
        assert_refused(said, lambda name: given)

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("", None, r"is a folder without model\.safetensors"),
            ("model.safetensors", None, "can't be read as safetensors"),
            ("model.safetensors", "no tensors", "can't be read as safetensors"),
            ("model.safetensors.index.json", "{", "can't be read"),
            ("model.safetensors.index.json", "[]", "no index of safetensors"),
            ("model.safetensors.index.json", "{}", "no index of safetensors"),
        ],
    )
    def test_a_file_that_holds_no_weights(
        self, name: str, content: str | None, said: str, tmp_path: Path
    ) -> None:
        if content is not None:
            (tmp_path / name).write_text(content)
        assert_refused(said, tmp_path / name)
