"""Which weights the axis tensor splits: by transformers' plans, and by DeepSpeed's section."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from spmdzero.config import load_config
from spmdzero.engine._setup import require_sharing_within_host
from spmdzero.engine._tensor_axis import tensor_dims
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.plan import MeshSpec

MESH = MeshSpec((("fsdp", 4), ("tensor", 2)))
LLAMAS = {"o_proj.weight": 1, "q_proj.weight": 0, "down_proj.weight": 1, "up_proj.weight": 0}


class Planned(nn.Module):
    """A model whose plan has one layer in a given style, and a column to have any."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 16), nn.Linear(8, 8)
        self._tp_plan = {"layer": style, "other": "colwise"}


class Named(nn.Module):
    """Layers by dotted names, and the type of model that transformers' config would have."""

    def __init__(self, names: tuple[str, ...], model_type: str = "mine") -> None:
        super().__init__()
        for name in names:
            owner: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.add_module(last, nn.Linear(8, 16, bias=False))
        self.config = type("Config", (), {"model_type": model_type})()


def dims_of(model: nn.Module, **section: Any) -> dict[str, int]:
    given = {"train_batch_size": 4, "tensor_parallel": {"autotp_size": 2, **section}}
    return tensor_dims(load_config(given), model, mesh=MESH)


def styles_of_models() -> Iterator[tuple[str, str]]:
    """Yields each style that a plan in transformers' sources names, and the file."""
    found = find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        pytest.skip("transformers isn't installed")
    for path in Path(found.submodule_search_locations[0], "models").rglob("*.py"):
        if path.name.startswith(("configuration_", "modeling_")):
            for plan in re.findall(r"_tp_plan = (\{.*?\})\n", path.read_text(), re.DOTALL):
                yield from ((style, path.name) for style in re.findall(r'": "(\w+)"', plan))


def test_each_style_of_transformers_plans_is_known() -> None:
    files = dict(styles_of_models())
    assert len(files) > 10
    for style, file in files.items():
        try:
            dims_of(Planned(style))
        except SpmdZeroConfigError as error:
            raise AssertionError(f"{file}: {error}") from error
    with pytest.raises(SpmdZeroConfigError, match=r"layer\.weight as 'sideways'"):
        dims_of(Planned("sideways"))


@pytest.mark.parametrize(
    ("style", "dim"), [("rowwise_split_input", 1), ("mla_kv_a_proj", None), ("packed_colwise", 0)]
)
def test_a_style_splits_as_transformers_does(style: str, dim: int | None) -> None:
    found = dims_of(Planned(style))
    assert found.get("layer.weight") == dim
    assert found["other.weight"] == 0


ATTENTION = ("layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj")
MLP = ("layers.0.mlp.up_proj", "layers.0.mlp.down_proj")
SKIPPED = {"patterns": [r".*\.o_proj\.weight"], "partition_type": "skip"}
ROW = {"patterns": [r".*\.o_proj\.weight"], "partition_type": "row"}


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"preset_model": "llama"}, LLAMAS),
        (
            {"preset_model": "llama", "partition_config": {"layer_specs": [SKIPPED]}},
            {n: d for n, d in LLAMAS.items() if n != "o_proj.weight"},
        ),
        (
            {
                "preset_model": "llama",
                "partition_config": {"use_default_specs": False, "layer_specs": [ROW]},
            },
            {"o_proj.weight": 1},
        ),
        (
            {
                "partition_config": {
                    "layer_specs": [
                        SKIPPED | {"model_types": ["theirs"]},
                        ROW | {"model_types": ["MINE"]},
                    ]
                }
            },
            {"o_proj.weight": 1},
        ),
    ],
    ids=["preset_model", "skip", "use_default_specs", "model_types"],
)
def test_deepspeeds_section_names_weights(section: dict[str, Any], named: dict[str, int]) -> None:
    found = dims_of(Named((*ATTENTION, *MLP)), **section)
    assert {name.split(".", 3)[3]: dim for name, dim in found.items()} == named


@pytest.mark.parametrize(
    ("preset", "names"),
    [
        ("bloom", {"self_attention.query_key_value": 0, "mlp.dense_4h_to_h": 1}),
        ("chatglm", {"self_attention.query_key_value": 0, "self_attention.dense": 1}),
        ("deepseek_v2", {"self_attn.kv_b_proj": 0, "mlp.gate": None, "self_attn.q_a_proj": None}),
        ("mixtral", {"block_sparse_moe.experts.1.w2": 1, "block_sparse_moe.gate": None}),
        ("phi3", {"mlp.gate_up_proj": 0, "self_attn.qkv_proj": 0}),
        ("qwen2", {"self_attn.k_proj": 0, "mlp.down_proj": 1}),
    ],
)
def test_a_preset_knows_its_models_layers(preset: str, names: dict[str, int | None]) -> None:
    found = dims_of(Named(tuple(f"h.3.{name}" for name in names)), preset_model=preset)
    assert {n: found.get(f"h.3.{n}.weight") for n in names} == names


def test_an_axis_from_host_to_host_is_refused_with_the_numbers() -> None:
    within = MeshSpec((("fsdp", 4), ("tensor", 4)))
    require_sharing_within_host(within, devices=8)
    across = MeshSpec((("fsdp", 2), ("tensor", 8)))
    with pytest.raises(SpmdZeroConfigError, match=r"host has 4 devices, .* tensor \(8\)") as error:
        require_sharing_within_host(across, devices=4)
    assert "divides 4" in str(error.value)
