"""Each name of DeepSpeed's public API is here with its parameters, or in the list of refusals."""

import importlib
from typing import Any

import pytest

import spmdzero
from spmdzero.compat.refusals import REFUSALS
from tests.surface import render
from tests.surface.surface import OTHER_PARAMETERS, RECORDED, find, parameters, status


def test_every_name_is_here_or_refused() -> None:
    assert [name for name in RECORDED if status(name) == "missing"] == []


def named(parameters: list[list[str]]) -> dict[str, str]:
    """Name -> default, in order, without *args and **kwargs."""
    return {name: default for name, kind, default in parameters if not kind.startswith("VAR_")}


def difference(name: str) -> str | None:
    """What is not as in DeepSpeed about a name that is here."""
    recorded = RECORDED[name]
    if recorded["kind"] == "property":
        return None if isinstance(find(name), property) else "is no property"
    if name in OTHER_PARAMETERS or recorded["parameters"] is None:
        return None
    wanted, ours = named(recorded["parameters"]), named(parameters(find(name)))
    if list(ours)[: len(wanted)] != list(wanted):
        return f"has the parameters {list(ours)}, not {list(wanted)}"
    for parameter, default in wanted.items():
        # DeepSpeed computes these while it is imported: an object, or its importer's name.
        computed = default.startswith("<") or parameter == "debug"
        if default and not computed and ours[parameter] != default:
            return f"has {parameter}={ours[parameter]}, not {default}"
    own = [parameter for parameter in ours if parameter not in wanted and not ours[parameter]]
    return f"has parameters of its own without a default: {own}" if own else None


def test_parameters_are_deepspeeds() -> None:
    found = {name: difference(name) for name in RECORDED if status(name) == "here"}
    assert len(found) > 300
    assert {name: how for name, how in found.items() if how} == {}


def test_a_refused_name_raises_one_clear_error_when_it_is_used() -> None:
    owners = {
        "DeepSpeedEngine": spmdzero.Engine,
        "accelerator.DeepSpeedAccelerator": spmdzero.accelerator.DeepSpeedAccelerator,
    }
    for path, refusal in REFUSALS.items():
        package, _, last = path.rpartition(".")
        name = f"deepspeed.{path}"
        used: Any = getattr(owners[package], last) if package in owners else find(name)
        with pytest.raises(spmdzero.SpmdZeroUsageError) as caught:
            used()
        assert str(caught.value) == f"{name}: {refusal.reason}. {refusal.instead}"


def test_a_refused_class_can_be_asked_about() -> None:
    assert not isinstance(object(), spmdzero.DualPipeVModule)

    class Pipeline(spmdzero.DualPipeVModule):
        pass

    with pytest.raises(spmdzero.SpmdZeroUsageError, match="there is no expert parallelism"):
        Pipeline()


def test_an_unknown_name_is_an_attribute_error() -> None:
    for module in (spmdzero, spmdzero.comm, spmdzero.utils, spmdzero.ops.adam):
        with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
            _ = module.no_such_name


def test_docs_api_surface_md_is_what_its_command_writes() -> None:
    assert render.PAGE.read_text() == render.rendered(), "run python -m tests.surface.render"


def test_importing_a_refused_module_says_why() -> None:
    for module, refused in {
        "moe.mappings": "moe.mappings",
        "ops.op_builder": "ops.op_builder",
        "runtime.pipe.schedule": "runtime.pipe.schedule",
        "runtime.domino.transformer": "runtime.domino",
        "runtime.zero.stage3": "runtime.zero.stage3",
    }.items():
        with pytest.raises(ModuleNotFoundError) as caught:
            importlib.import_module(f"spmdzero.{module}")
        assert isinstance(caught.value, spmdzero.SpmdZeroUsageError)
        # Python asks for the outermost one first.
        assert str(caught.value).startswith(f"deepspeed.{refused}: ")
        assert caught.value.name == f"spmdzero.{refused}"
    assert "DeepSpeed's stage 3 hooks modules" in str(caught.value)


def test_an_old_path_is_the_module_that_it_stands_for() -> None:
    paths = ("utils.logging", "runtime.utils", "runtime.activation_checkpointing.checkpointing")
    names = ("logging", "runtime_utils", "checkpointing")
    for path, name in zip(paths, names, strict=True):
        real = importlib.import_module(f"spmdzero.compat.{name}")
        assert importlib.import_module(f"spmdzero.{path}") is real
        assert real.__spec__.name == f"spmdzero.compat.{name}"
    from spmdzero.runtime.engine import DeepSpeedEngine
    from spmdzero.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    assert (DeepSpeedEngine, DeepSpeedZeroOptimizer) == (
        spmdzero.Engine,
        spmdzero.DeepSpeedOptimizer,
    )


def test_a_module_that_is_nobodys_is_not_found_as_ever() -> None:
    for module in ("spmdzero.no_such", "spmdzero.runtime.no_such", "moe"):
        with pytest.raises(ModuleNotFoundError, match="No module named") as caught:
            importlib.import_module(module)
        assert type(caught.value) is ModuleNotFoundError


def test_what_is_inside_of_a_refused_name_is_refused_with_its_reason() -> None:
    with pytest.raises(AttributeError, match=r"moe\.mappings\.gather_tokens: spmdzero is"):
        _ = spmdzero.moe.mappings.gather_tokens
    assert not hasattr(spmdzero.moe.mappings, "gather_tokens")


def test_the_names_of_a_schedules_parameters_are_deepspeeds() -> None:
    theirs = pytest.importorskip("deepspeed.runtime.lr_schedules")
    names = {name: value for name, value in vars(theirs).items() if name.isupper()}
    assert len(names) > 20
    ours = spmdzero.runtime.lr_schedules
    assert {name: getattr(ours, name) for name in names} == names
