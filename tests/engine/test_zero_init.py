"""`deepspeed.zero.Init` at stage 3: a model is built into its shards, its values are the same."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import spmdzero
from spmdzero import zero
from spmdzero.backend import arrays
from spmdzero.compat import zero_init
from tests.engine.test_stage_3 import ALL, Tied, batches
from tests.support import engines

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

CONFIG = engines.config(zero_optimization=ALL)


@pytest.fixture(autouse=True)
def _no_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has a parameter leave the host as soon as another is registered or computed with."""
    monkeypatch.setattr(zero_init, "_ROOM", 0)
    yield
    if torch.distributed.is_initialized():
        # The context makes it, as DeepSpeed's does; other tests are of a process alone.
        torch.distributed.destroy_process_group()


class Applied(Tied):
    """Initialises its children's parameters itself: by `apply`, by `data`, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init)
        nn.init.orthogonal_(self.blocks[0].up.weight)
        one, other = self.blocks[0].down.weight.data, self.blocks[1].down.weight.data
        other.copy_(one)
        self.blocks[1].up.weight.data[3].zero_()
        with torch.no_grad():
            self.blocks[1].up.weight /= 2
            self.blocks[0].up.bias += self.blocks[1].up.bias

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            nn.init.uniform_(module.bias) if module.bias is not None else None
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class Copied(nn.Module):
    """Layers that are copies of one, an LSTM, whose parameters have weak references, and a view."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(64, 64)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
        self.rnn = nn.LSTM(64, 64)
        self.wide = nn.Linear(64, 64, bias=False)
        self.turned = nn.Parameter(self.wide.weight.t())
        nn.init.ones_(self.turned[:, 0])
        self.out = nn.Parameter(torch.randn(64, 64))
        self.small = nn.Parameter(torch.zeros(()))
        self.register_parameter("none", None)


def made(build: Callable[[], nn.Module], config: Any = None) -> nn.Module:
    torch.manual_seed(3)
    if config is None:
        return build()
    with zero.Init(config_dict_or_path=config):
        return build()


def assert_same_values(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert parameter.shape == theirs[name].shape
        assert parameter.dtype == theirs[name].dtype
        assert torch.equal(parameter.detach().cpu(), theirs[name].detach()), name


def on_devices(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if arrays.is_mine(p)}


@pytest.mark.parametrize("build", [Tied, Applied, Copied])
def test_a_model_has_the_values_that_it_has_without_the_context(
    build: Callable[[], nn.Module],
) -> None:
    inside = made(build, CONFIG)
    assert_same_values(inside, made(build))
    assert torch.distributed.get_rank() == 0


def test_what_is_split_rests_as_shards_and_what_stays_whole_on_the_host() -> None:
    inside = made(Applied, CONFIG)
    assert isinstance(inside.blocks[0].up.weight, nn.Parameter)
    assert inside.head.weight is inside.embed.weight
    moved = on_devices(inside)
    assert {"embed.weight", "blocks.0.up.weight", "blocks.1.down.weight"} <= moved
    for name in moved:
        parameter = inside.get_parameter(name)
        assert {shard.numel() for shard in arrays.local_shards(parameter)} == {
            parameter.numel() // 8
        }
    told = engines.config(zero_optimization=ALL | {"stage3_param_persistence_threshold": 16384})
    assert on_devices(made(Applied, told)) == set()
    # A view of a parameter stays one, and so do weak references.
    others = made(Copied, CONFIG)
    assert not {"turned", "wide.weight", "rnn.weight_ih_l0"} & on_devices(others)
    assert others.turned.data_ptr() == others.wide.weight.data_ptr()


def test_training_is_the_same() -> None:
    seen = []
    for config in (None, CONFIG):
        engine = spmdzero.initialize(model=made(Applied, config), config=CONFIG)[0]
        seen.append([engines.one_call(engine, *batches(1)).item() for _ in range(3)])
    assert seen[0] == seen[1]


def test_an_optimizer_made_before_the_engine_trains_the_same_parameters() -> None:
    model = made(Applied, CONFIG)
    own = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = spmdzero.initialize(model=model, optimizer=own, config=CONFIG | {"optimizer": None})[0]
    before = model.embed.weight.detach().cpu()
    engines.one_call(engine, *batches(1))
    assert not torch.equal(model.embed.weight.detach().cpu(), before)


@pytest.mark.parametrize(
    "other",
    [
        {"zero_optimization": ALL, "bf16": {"enabled": True}},
        {"zero_optimization": {"stage": 2}},
        {"zero_optimization": ALL, "spmd": {"mesh": {"data": 2, "fsdp": 4}}},
    ],
    ids=["bf16", "stage 2", "another mesh"],
)
def test_the_engines_config_may_be_another(other: dict[str, Any]) -> None:
    seen = []
    for config in (None, CONFIG):
        engine = engines.start(made(Applied, config), **other)
        seen.append(engines.one_call(engine, *batches(1)).item())
        plan = engine.plan.at_rest("parameter/embed.weight")
        assert arrays.is_split(engine.module.embed.weight) == plan.is_sharded
    assert seen[0] == seen[1]


def most_on_host(build: Callable[[], nn.Module], config: Any = None) -> int:
    """The most bytes of parameters that are on the host whenever one is registered."""
    every: list[nn.Parameter] = []
    found = [0]

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            every.append(parameter)
            # To ask for a parameter's device would bring it to the host.
            with torch._C.DisableTorchFunction():
                found.append(sum(p.nbytes for p in dict.fromkeys(every) if not arrays.is_mine(p)))

    hook = register_module_parameter_registration_hook(count)
    try:
        made(build, config)
    finally:
        hook.remove()
    return max(found)


def test_the_host_holds_a_few_parameters_at_a_time() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(24)))
        model.apply(lambda part: nn.init.normal_(part.weight) if hasattr(part, "weight") else None)
        # What initialises them has gathered none but the last.
        model.append(nn.Linear(256, 256, bias=False))
        return model

    one = 256 * 256 * 4
    assert most_on_host(build) == 25 * one
    assert most_on_host(build, CONFIG) <= 2 * one


def test_gathered_parameters_are_on_the_host_before_there_is_an_engine() -> None:
    model = made(Applied, CONFIG)
    weight = model.blocks[0].up.weight
    with zero.GatheredParameters(list(model.blocks[0].parameters()), modifier_rank=0):
        assert not arrays.is_mine(weight)
        torch.manual_seed(5)
        weight.data.normal_()
    assert arrays.is_mine(weight)
    torch.manual_seed(5)
    assert torch.equal(weight.detach().cpu(), torch.randn(256, 64))
    with zero.GatheredParameters(weight):
        assert torch.equal(weight, torch.randn(256, 64, generator=torch.manual_seed(5)))
    engine = engines.start(model, zero_optimization=ALL)
    with zero.GatheredParameters(weight, modifier_rank=0):
        # An engine's stays where it is.
        assert arrays.is_mine(weight)
    assert torch.isfinite(engines.one_call(engine, *batches(1))).item()


def test_a_module_that_is_there_moves_at_once_and_nesting_changes_nothing() -> None:
    plain = made(Applied)
    values = copy.deepcopy(plain)
    zero.Init(module=plain, config_dict_or_path=CONFIG)
    assert "embed.weight" in on_devices(plain)
    assert_same_values(plain, values)
    torch.manual_seed(3)
    with zero.Init(config_dict_or_path=CONFIG), zero.Init(config_dict_or_path=CONFIG):
        inner = Applied()
    assert_same_values(inner, values)
    assert "embed.weight" in on_devices(inner)


def test_an_error_within_leaves_nothing_behind() -> None:
    def breaks() -> nn.Module:
        nn.Linear(64, 64)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        made(breaks, CONFIG)
    after = nn.Linear(64, 64)
    after.weight.data.zero_()
    assert on_devices(after) == set()


def test_without_a_config_it_says_that_the_host_holds_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="spmdzero"), zero.Init():
        inside = Tied()
    assert on_devices(inside) == set()
    assert sum("config_dict_or_path" in record.message for record in caplog.records) == 1


class CopiedParts(nn.Module):
    """Blocks that are copies of one with a buffer, as peft and nn.TransformerEncoder make them."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
        block[0].weight.tag = "kept"
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(2))
        encoder = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)


def _two(build: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """What becomes of a module that was built inside of the context, and of one that wasn't."""
    inside, outside = made(CopiedParts, CONFIG), made(CopiedParts)
    assert_same_values(inside, outside)
    return build(inside), build(outside)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy of a copy": lambda module: copy.deepcopy(copy.deepcopy(module)),
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
}


@pytest.mark.parametrize("build", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_module_from_the_context_has_its_values_and_follows_writes(
    build: Callable[[nn.Module], nn.Module],
) -> None:
    ours, plain = _two(build)
    assert_same_values(ours, plain)
    tags = [getattr(p, "tag", None) for p in ours.parameters()]
    expected = [getattr(p, "tag", None) for p in plain.parameters()]
    # torch_xla's parameters are torch's own, whose copies have no attributes.
    assert tags in (expected, ["kept" if t else None for t in tags])
    with zero.GatheredParameters(list(ours.parameters())), torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    assert_same_values(ours, plain)


def test_a_copy_rests_as_shards_in_an_engine() -> None:
    inside, _ = _two(lambda module: module)
    engine, *_ = spmdzero.initialize(model=copy.deepcopy(inside), config=CONFIG)
    weight = engine.module.get_parameter("blocks.1.0.weight")
    assert {shard.numel() for shard in arrays.local_shards(weight)} == {weight.numel() // 8}
    assert torch.equal(weight.detach().cpu(), inside.get_parameter("blocks.1.0.weight").cpu())


AUTO = "auto"
# transformers' own ds_config_zero3.json, which its documentation hands to everyone.
TRANSFORMERS: dict[str, Any] = {
    "fp16": {
        "enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
        "hysteresis": 2, "min_loss_scale": 1,
    },
    "bf16": {"enabled": AUTO},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": AUTO, "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": AUTO, "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO, "steps_per_print": 2000,
    "train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": False,
}  # fmt: skip


def test_numbers_that_a_client_fills_in_later_may_be_auto() -> None:
    assert_same_values(made(Tied, TRANSFORMERS), made(Tied))
    small = TRANSFORMERS["zero_optimization"] | {"stage3_param_persistence_threshold": 0}
    split = made(Tied, TRANSFORMERS | {"zero_optimization": small})
    assert "blocks.0.up.weight" in on_devices(split)
    # What needs the numbers asks for them, and what is refused stays refused.
    with pytest.raises(spmdzero.SpmdZeroConfigError, match=r"optimizer\.params\.lr"):
        spmdzero.initialize(model=split, config=TRANSFORMERS)
    with pytest.raises(spmdzero.SpmdZeroConfigError, match="autotuning"):
        made(Tied, TRANSFORMERS | {"autotuning": {"enabled": True}})
