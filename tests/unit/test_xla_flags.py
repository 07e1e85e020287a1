"""Named flag sets: what is in them, when they reach libtpu, when they come too late."""

import logging
import subprocess
import sys

import pytest

import spmdzero
from spmdzero.backend.torch_xla import DeviceMesh, flags
from tests.support.processes import environment


def test_each_set_keeps_torch_xlas_own_and_only_v6e_adds_to_it() -> None:
    kept = {"xla_tpu_prefer_async_allgather_to_allreduce": "true"}
    assert flags.flags_for("none") == {}
    assert flags.flags_for("v5e") == flags.flags_for("v5p") == kept
    assert flags.flags_for("v6e") == kept | {
        "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
    }


def test_every_flag_says_what_it_does_and_who_measured_it() -> None:
    for members in flags.FLAG_SETS.values():
        for flag in members:
            assert flag.effect
            assert "libtpu 0.0.21" in flag.source


def test_a_set_that_does_not_exist_is_refused() -> None:
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="none, v5e, v5p, v6e"):
        flags.flags_for("v7x")


def test_the_config_refuses_it_too() -> None:
    with pytest.raises(spmdzero.SpmdZeroConfigError, match=r"spmd\.xla_flags"):
        spmdzero.initialize(
            model=spmdzero_model(),
            config={"train_micro_batch_size_per_gpu": 1, "spmd": {"xla_flags": "v7x"}},
        )


def spmdzero_model() -> object:
    from torch import nn

    return nn.Linear(4, 4)


def test_on_cpu_a_set_is_logged_once_and_changes_nothing(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        flags.apply("v5e")
        flags.apply("v5e")
    assert [r.message for r in caplog.records] == [
        '"spmd": {"xla_flags": "v5e"} has no effect here, it sets flags of the TPU compiler'
    ]
    assert flags.in_force() == {}


def test_for_a_tpu_that_has_not_started_the_set_joins_what_the_caller_gave() -> None:
    code = (
        "import os\n"
        "from spmdzero.backend.torch_xla import flags\n"
        "os.environ['PJRT_DEVICE'] = 'TPU'\n"
        "flags.apply('v6e')\n"
        "print(flags.in_force())\n"
    )
    given = "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=4"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(PJRT_DEVICE="CPU", LIBTPU_INIT_ARGS=given),
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(
        {
            "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "4",
            "xla_tpu_prefer_async_allgather_to_allreduce": "true",
            "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
        }
    )


def test_after_the_runtime_has_started_a_missing_flag_is_an_error_with_the_variable(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The runtime runs already; only what decides for TPU is said to be one.
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_prefer_async_allgather_to_allreduce=true")
    flags.apply("v5e")
    with pytest.raises(spmdzero.SpmdZeroRuntimeError, match="LIBTPU_INIT_ARGS='--xla_tpu_use"):
        flags.apply("v6e")
