"""Recorded calls of a step: what their arguments are when they are made after it."""

import collections
import dataclasses
from typing import Any

import pytest
import torch

from spmdzero.integrations._recorded_calls import Call, RecordedCalls, RecordedList

pytestmark = pytest.mark.backends("any")


@dataclasses.dataclass(frozen=True)
class Record:
    value: Any
    label: str = "kept"


class Metric:
    """Takes note of what it is called with."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def update(self, *args: Any, **named: Any) -> int:
        self.given.append((*args, named) if named else args)
        return len(self.given)


def made(*args: Any, **named: Any) -> tuple[Any, ...]:
    """What a metric gets that a step calls with these."""
    metric = Metric()
    calls = RecordedCalls(lambda path: metric)
    with calls.record():
        calls.note("metric", "update", *args, **named)
        output = calls.output(None)
    calls.make(output, given=lambda call: call)
    return metric.given[0]


def test_containers_of_tensors_leave_a_step_with_their_tensors_as_outputs() -> None:
    one = torch.ones(2)
    calls = RecordedCalls(lambda path: None)
    for given in (Record(one), collections.OrderedDict(a=one), [one, (one, 1)]):
        with calls.record():
            calls.note("metric", "update", given)
            (call,) = calls.output(None)["calls"].values()
        assert isinstance(call, Call)
        assert call.args == (given,)
        assert type(call.args[0]) is type(given)


def test_a_keyword_argument_arrives_whatever_its_name() -> None:
    # torchmetrics' own name for the labels.
    named = {"preds": 1, "target": 2, "method": 3, "label": 4}
    assert made(**named) == (named,)


def test_what_is_no_container_arrives_itself() -> None:
    metric, one = Metric(), torch.ones(2)
    given = made(metric, {"a": [one, 1.5]}, Record(metric))
    assert given[0] is metric
    assert given[1]["a"][0] is one
    assert given[2].value is metric


def test_a_list_that_is_written_later_was_recorded_before() -> None:
    metric, items = Metric(), [1]
    calls = RecordedCalls(lambda path: metric)
    with calls.record():
        calls.note("metric", "update", items)
        items.append(2)
        output = calls.output(None)
    calls.make(output, given=lambda call: call)
    assert metric.given == [([1],)]


def test_a_list_of_the_module_arrives_as_the_module_has_it() -> None:
    metric, real = Metric(), [3]
    calls = RecordedCalls(lambda path: {"metric": metric, "items": real}[path])
    with calls.record():
        calls.note("metric", "update", RecordedList("items", calls))
        output = calls.output(None)
    calls.make(output, given=lambda call: call)
    assert metric.given[0][0] is real


def test_results_of_calls_are_filled_in() -> None:
    metric = Metric()
    calls = RecordedCalls(lambda path: metric)
    with calls.record():
        first = calls.note("metric", "update", 1)
        second = calls.note("metric", "update", {"of": first})
        output = calls.output([second, 5])
    assert calls.make(output, given=lambda call: call) == [2, 5]
    assert metric.given == [(1,), ({"of": 1},)]
