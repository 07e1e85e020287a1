"""The walk of nested containers: what it finds, and that every container survives."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutput

from spmdzero.backend import (
    Batch,
    Replicated,
    Skeleton,
    UnknownContentError,
    form_of,
    found,
    map_tensors,
    mapped,
    replicated,
)

pytestmark = pytest.mark.backends("any")


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


class Tagged(list[Any]):
    """It has an attribute, and its class is not made of items."""

    def __init__(self, tag: str, *items: Any) -> None:
        super().__init__(items)
        self.tag = tag


class TaggedPair(Pair):
    """A named tuple that is made otherwise, with an attribute."""

    tag = ""

    def __new__(cls, both: Any) -> "TaggedPair":
        made = super().__new__(cls, both, both)
        made.tag = "kept"
        return made


@dataclasses.dataclass
class Derived:
    """It computes with its tensor when it is made."""

    value: torch.Tensor
    more: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.more = self.value * 1


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
    "named tuple of its own": (TaggedPair(ONE), ["0", "1"]),
    "list of its own": (Tagged("kept", ONE, 3), ["0"]),
    "what torch returns": (torch.return_types.max((ONE, ONE)), ["0", "1"]),
    "mapping of its own": (collections.UserDict(a=ONE), ["a"]),
    "dataclass": (Record({"x": ONE}), ["value.x"]),
    "dataclass with a field of its own": (Derived(ONE), ["value", "more"]),
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
    assert map_tensors(Tagged("kept", ONE), double).tag == "kept"
    assert map_tensors(TaggedPair(ONE), double).tag == "kept"


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


@pytest.mark.parametrize("name", sorted(TREES.keys() - {"plain object"}))
def test_all_ways_to_walk_find_the_same_tensors(name: str) -> None:
    tree, _ = TREES[name]
    visited: list[torch.Tensor] = []
    map_tensors(tree, lambda _, tensor: visited.append(tensor) or tensor)
    assert [*map(id, found(tree, torch.Tensor))] == [*map(id, visited)]
    forms: list[torch.Tensor] = []
    form_of(tree, torch.Tensor, lambda tensor: forms.append(tensor) or tensor.shape)
    assert [*map(id, forms)] == [*map(id, visited)]
    made = mapped(tree, torch.Tensor, lambda tensor: tensor * 2)
    assert type(made) is type(tree)
    doubled = [t * 2 for t in visited]
    assert all(map(torch.equal, found(made, torch.Tensor), doubled))
    assert len(found(made, torch.Tensor)) == len(doubled)


def test_lists_and_dicts_are_the_copys_own_even_where_nothing_changes() -> None:
    tree = {"a": [1, {"b": 2}]}
    made = mapped(tree, torch.Tensor, double)
    assert made == tree
    assert made is not tree
    assert made["a"] is not tree["a"]
    assert made["a"][1] is not tree["a"][1]


def test_a_container_may_be_a_leaf_and_objects_may_be_replaced() -> None:
    tagged, holder = Tagged("kept", ONE), Holder(ONE)
    made = mapped([tagged, holder, 1, None], Tagged, lambda leaf: leaf.tag, type)
    assert made == ["kept", Holder, 1, None]


SAME = [
    ((), ()),
    ({"a": [ONE]}, {"a": [ONE + 1]}),
    (float("nan"), float("nan")),
    (Record(ONE), Record(ONE)),
    (Tagged("one", ONE), Tagged("one", ONE)),
    (CausalLMOutput(loss=ONE), CausalLMOutput(loss=ONE)),
]
OTHERS = [
    ([ONE], (ONE,)),
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ({"a": 1}, {"b": 1}),
    ({"a": 1}, Named(a=1)),
    (Record(ONE, "one"), Record(ONE, "other")),
    (Tagged("one", ONE), Tagged("other", ONE)),
    (CausalLMOutput(loss=ONE), CausalLMOutput(logits=ONE)),
    (Pair(ONE, 1), (ONE, 1)),
    (torch.float32, torch.float64),
    (torch.Size([2]), (2,)),
]


def test_forms_are_equal_for_trees_that_differ_in_tensors_only() -> None:
    for one, other in SAME:
        assert Skeleton.of(one)[0] == Skeleton.of(other)[0], (one, other)
        assert hash(Skeleton.of(one)[0]) == hash(Skeleton.of(other)[0])
    for one, other in OTHERS:
        assert Skeleton.of(one)[0] != Skeleton.of(other)[0], (one, other)


def _with_tensor() -> Any:
    tagged = Tagged("one", 1)
    tagged.tag = ONE  # type: ignore[assignment]
    return tagged


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (Holder(ONE), "a Holder, whose content can't be compared between steps"),
        ([{1, 2}], "a set, whose content"),
        (nn.Linear(1, 1), "a Linear, whose content"),
        (_with_tensor(), "a Tagged with a tensor that is not one of its items"),
        (TaggedPair(ONE), "a TaggedPair that can't be copied"),
    ],
    ids=["object", "set", "module", "attribute", "without copies"],
)
def test_what_can_change_unseen_has_no_form(tree: Any, said: str) -> None:
    with pytest.raises(UnknownContentError, match=said):
        Skeleton.of(tree)


NO_SKELETON = {"plain object", "set aside", "named tuple of its own"}


@pytest.mark.parametrize("name", sorted(TREES.keys() - NO_SKELETON))
def test_a_skeleton_is_filled_with_other_tensors(name: str) -> None:
    tree, _ = TREES[name]
    skeleton, tensors = Skeleton.of(tree)
    made = skeleton.filled([tensor * 2 for tensor in tensors])
    assert type(made) is type(tree)
    assert [*map(id, tensors)] == [*map(id, found(tree, torch.Tensor))]
    assert Skeleton.of(made)[0] == skeleton
    doubled = [tensor * 2 for tensor in tensors]
    assert all(map(torch.equal, found(made, torch.Tensor), doubled))


def test_a_filled_skeleton_has_containers_of_its_own() -> None:
    skeleton, _ = Skeleton.of({"a": [1], "b": collections.UserDict(c=2)})
    one = skeleton.filled([])
    one["a"].append(2)
    one["b"]["c"] = 3
    assert skeleton.filled([]) == {"a": [1], "b": {"c": 2}}
