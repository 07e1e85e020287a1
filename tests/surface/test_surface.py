"""Each name of DeepSpeed's public API is here with its parameters, or in the list of refusals."""

import importlib
from typing import Any

import pytest

import spmdzero
from spmdzero.compat.refusals import REFUSALS
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


@pytest.mark.parametrize(
    ("module", "refused"),
    [
        ("moe.layer", "moe"),
        ("pipe", "pipe"),
        ("inference.engine", "inference"),
        ("sequence.layer", "sequence"),
        ("ops.op_builder", "ops.op_builder"),
        ("runtime.pipe.topology", "runtime.pipe"),
        ("runtime.zero.stage3", "runtime.zero.stage3"),
    ],
)
def test_importing_a_refused_module_says_why(module: str, refused: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(f"spmdzero.{module}")
    assert isinstance(caught.value, spmdzero.SpmdZeroUsageError)
    refusal = REFUSALS[refused]
    # Python asks for the outermost one first.
    assert str(caught.value) == f"deepspeed.{refused}: {refusal.reason}. {refusal.instead}"
    assert caught.value.name == f"spmdzero.{refused}"


def test_a_module_that_is_nobodys_is_not_found_as_ever() -> None:
    for module in ("spmdzero.no_such", "spmdzero.runtime.no_such", "moe"):
        with pytest.raises(ModuleNotFoundError, match="No module named") as caught:
            importlib.import_module(module)
        assert type(caught.value) is ModuleNotFoundError


def test_what_is_inside_of_a_refused_name_is_refused_with_its_reason() -> None:
    with pytest.raises(AttributeError, match=r"deepspeed\.moe\.layer: spmdzero is data-parallel"):
        _ = spmdzero.moe.layer.MoE
    assert not hasattr(spmdzero.moe, "layer")


def test_the_names_of_a_schedules_parameters_are_deepspeeds() -> None:
    theirs = pytest.importorskip("deepspeed.runtime.lr_schedules")
    names = {name: value for name, value in vars(theirs).items() if name.isupper()}
    assert len(names) > 20
    ours = spmdzero.runtime.lr_schedules
    assert {name: getattr(ours, name) for name in names} == names
