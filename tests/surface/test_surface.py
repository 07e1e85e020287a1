"""Each name of DeepSpeed's public API is here with its parameters, or in the list of refusals."""

from typing import Any

import pytest

import spmdzero
from spmdzero.refusals import REFUSALS
from tests.surface import render
from tests.surface.surface import OTHER_PARAMETERS, RECORDED, find, parameters, status

HERE = [name for name in RECORDED if status(name) == "here"]
REFUSED = [f"deepspeed.{path}" for path in REFUSALS]


def test_every_name_is_here_or_refused() -> None:
    assert [name for name in RECORDED if status(name) == "missing"] == []


def named(parameters: list[list[str]]) -> dict[str, str]:
    """Name -> default, in order, without *args and **kwargs."""
    return {name: default for name, kind, default in parameters if not kind.startswith("VAR_")}


@pytest.mark.parametrize("name", HERE)
def test_parameters_are_deepspeeds(name: str) -> None:
    recorded = RECORDED[name]
    if recorded["kind"] == "property":
        assert isinstance(find(name), property)
        return
    if name in OTHER_PARAMETERS or recorded["parameters"] is None:
        return
    wanted, ours = named(recorded["parameters"]), named(parameters(find(name)))
    assert list(ours)[: len(wanted)] == list(wanted)
    for parameter, default in wanted.items():
        # DeepSpeed computes these while it is imported: an object, or its importer's name.
        if default and not default.startswith("<") and parameter != "debug":
            assert ours[parameter] == default, parameter
    assert all(ours[parameter] for parameter in ours if parameter not in wanted), "needs defaults"


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_name_raises_one_clear_error_when_it_is_used(name: str) -> None:
    package, _, last = name.removeprefix("deepspeed.").rpartition(".")
    owners = {
        "DeepSpeedEngine": spmdzero.Engine,
        "accelerator.DeepSpeedAccelerator": spmdzero.accelerator.DeepSpeedAccelerator,
    }
    used: Any = getattr(owners[package], last) if package in owners else find(name)
    with pytest.raises(spmdzero.SpmdZeroUsageError) as caught:
        used()
    refusal = REFUSALS[name.removeprefix("deepspeed.")]
    assert str(caught.value) == f"{name}: {refusal.reason}. {refusal.instead}"


def test_a_refused_class_can_be_asked_about() -> None:
    assert not isinstance(object(), spmdzero.PipelineModule)

    class Pipeline(spmdzero.PipelineModule):
        pass

    with pytest.raises(spmdzero.SpmdZeroUsageError, match="no tensor, pipeline"):
        Pipeline()


def test_an_unknown_name_is_an_attribute_error() -> None:
    for module in (spmdzero, spmdzero.comm, spmdzero.utils, spmdzero.ops.adam):
        with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
            _ = module.no_such_name


def test_docs_api_surface_md_is_what_its_command_writes() -> None:
    assert render.PAGE.read_text() == render.rendered(), "run python -m tests.surface.render"
