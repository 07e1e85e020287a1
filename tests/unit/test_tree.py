"""map_tensors: which tensors it finds, what it calls them, and that every container survives."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutput

from spmdzero.backend import Batch, Replicated, map_tensors, replicated


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Record:
    value: Any
    label: str = "kept"


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.inner, self.note = [tensor], "kept"


class Slotted:
    __slots__ = ("x",)


ONE = torch.ones(2)
Named = collections.OrderedDict
Default = collections.defaultdict


def double(_: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


TREES: dict[str, tuple[Any, list[str]]] = {
    "tensor": (ONE, [""]),
    "dict": ({"a": ONE, "b": {"c": ONE}}, ["a", "b.c"]),
    "list and tuple": ([ONE, (ONE, 3)], ["0", "1.0"]),
    "named tuple": (Pair(ONE, [ONE]), ["0", "1.0"]),
    "dataclass": (Record({"x": ONE}), ["value.x"]),
    "model output": (CausalLMOutput(loss=ONE, hidden_states=(ONE,)), ["loss", "hidden_states.0"]),
    "plain object": (Holder(ONE), ["inner.0"]),
    "ordered dict": (Named(a=ONE), ["a"]),
    "defaultdict": (Default(list, a=ONE), ["a"]),
    "set aside": ({"a": None, "b": "text", "c": 1.5, "d": torch.float32, "e": Slotted()}, []),
}


@pytest.mark.parametrize("name", TREES)
def test_every_tensor_is_visited_once_under_its_dotted_path(name: str) -> None:
    tree, expected = TREES[name]
    seen: list[str] = []

    def note(path: str, tensor: torch.Tensor) -> torch.Tensor:
        seen.append(path)
        return tensor

    map_tensors(tree, note)
    assert seen == expected


@pytest.mark.parametrize("name", TREES)
def test_containers_keep_their_type_and_the_original_its_tensors(name: str) -> None:
    tree, paths = TREES[name]
    result = map_tensors(tree, double)
    assert type(result) is type(tree)
    values: list[float] = []

    def collect(_: str, tensor: torch.Tensor) -> torch.Tensor:
        values.append(tensor[0].item())
        return tensor

    map_tensors(tree, collect)
    map_tensors(result, collect)
    assert values == [1.0] * len(paths) + [2.0] * len(paths)


def test_what_is_not_a_tensor_stays() -> None:
    assert map_tensors(Record(ONE), double).label == "kept"
    assert map_tensors(Holder(ONE), double).note == "kept"
    assert map_tensors(Default(list, a=ONE), double)["missing"] == []


def test_an_object_without_tensors_is_returned_itself() -> None:
    class Plain:
        def __init__(self) -> None:
            self.numbers = (1, 2)

    for tree in (Plain(), Slotted(), object(), [1, (2,)], {"a": {"b": None}}):
        assert map_tensors(tree, double) is tree


def test_a_module_is_left_alone() -> None:
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    assert map_tensors([module], double)[0] is module
    assert torch.equal(module.weight, before)


def test_an_object_that_contains_itself_ends() -> None:
    holder = Holder(ONE)
    holder.inner.append(holder)
    assert torch.equal(map_tensors(holder, double).inner[0], ONE * 2)


def test_a_key_value_cache_is_mapped() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.full((1, 2, 3, 4), 5.0), 0)
    mapped = map_tensors(cache, double)
    assert mapped.layers[0].keys.unique().tolist() == [2.0]
    assert mapped.layers[0].values.unique().tolist() == [10.0]
    assert cache.layers[0].keys.unique().tolist() == [1.0]


def test_batch_and_replicated_reach_the_function_wrapped() -> None:
    seen: list[Any] = []

    def note(_: str, tensor: Any) -> Any:
        seen.append(type(tensor))
        return tensor

    map_tensors([Batch(ONE, 0), replicated(ONE), ONE], note)
    assert seen == [Batch, Replicated, torch.Tensor]
