"""Named flag sets: what is in them, when they reach libtpu, when they come too late."""

import ast
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import spmdzero
from spmdzero.backend.chips import _chips
from spmdzero.backend.torch_xla import DeviceMesh, flags
from tests.support.processes import environment

pytestmark = pytest.mark.backends("torch_xla")

HIDES = {
    "xla_enable_async_reduce_scatter_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": "true",
    "xla_tpu_ars_combiner_threshold_in_bytes": "1",
    "xla_tpu_decompose_every_reduce_scatters_hlos": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions": "true",
    "xla_tpu_scoped_vmem_limit_kib": "32768",
}


def test_each_set_keeps_torch_xlas_own_scatters_and_hides() -> None:
    kept = {"xla_tpu_prefer_async_allgather_to_allreduce": "true"}
    scatters = {
        "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
    }
    assert flags.flags_for("none") == {}
    assert flags.flags_for("v5e") == kept | scatters | HIDES
    # Of one newer libtpu says that elsewhere it may give wrong results.
    only_v5e = "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter"
    for name in ("v5p", "v6e"):
        assert flags.flags_for(name) | {only_v5e: "true"} == flags.flags_for("v5e")
        assert only_v5e not in flags.flags_for(name)


def test_the_set_of_tpu7x_is_the_published_one() -> None:
    assert flags.flags_for("tpu7x") == flags.flags_for("auto", chip="tpu7x")
    assert flags.flags_for("tpu7x") == {
        "xla_tpu_scoped_vmem_limit_kib": "61440",
        "xla_tpu_bf16_emission_mode": "NATIVE_EMISSION",
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
        "xla_tpu_use_single_sparse_core_for_all_gather_offload": "true",
    }


def test_auto_is_the_set_of_the_chip_that_is_named_or_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flags.flags_for("auto", chip="v6e") == flags.flags_for("v6e")
    # One that nothing was measured on.
    assert flags.flags_for("auto", chip="v4") == flags.flags_for("auto", chip="tpu8t") == {}
    monkeypatch.setattr(flags, "tpu_generation", lambda: "v5e")
    assert flags.flags_for("auto") == {}
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert flags.flags_for("auto") == flags.flags_for("v5e")


@pytest.mark.parametrize(
    ("devices", "generation"),
    [
        ([("0x1ae0", "0x0063")], "v5e"),
        ([("0x8086", "0x0063"), ("0x1ae0", "0x006f")], "v6e"),
        ([("0x1ae0", "0x0076")], "tpu7x"),
        ([("0x1ae0", "0x007c")], "tpu8t"),
        ([("0x1ae0", "0x0083")], "tpu8i"),
        # Another card of the same maker, and a generation that came later.
        ([("0x1ae0", "0x001f"), ("0x1ae0", "0x0099")], None),
        ([], None),
    ],
)
def test_the_generation_is_read_from_the_pci_bus(
    devices: list[tuple[str, str]],
    generation: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, (vendor, device) in enumerate(devices):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n")
        (tmp_path / str(number) / "device").write_text(f"{device}\n")
    monkeypatch.setattr(_chips, "_PCI", tmp_path)
    assert _chips.tpu_generation() == generation


def test_every_flag_says_what_it_does_and_who_measured_it() -> None:
    for name, members in flags.FLAG_SETS.items():
        for flag in members:
            assert flag.effect
            # The first that knows the generation.
            assert f"libtpu {'0.0.50.1' if name == 'tpu7x' else '0.0.21'}" in flag.source


def test_a_set_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        spmdzero.SpmdZeroUsageError, match="auto or one of none, v5e, v5p, v6e, tpu7x"
    ):
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


@pytest.mark.slow
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
    own = dict(flags.flags_for("v6e"))
    own["xla_tpu_relayout_group_size_threshold_for_reduce_scatter"] = "4"
    assert ast.literal_eval(done.stdout) == own


def test_after_the_runtime_has_started_a_missing_flag_is_an_error_with_the_variable(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The runtime runs already; only what decides for TPU is said to be one.
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    given = " ".join(f"--{name}={value}" for name, value in flags.flags_for("v5e").items())
    monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
    flags.apply("v5e")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_prefer_async_allgather_to_allreduce=true")
    with pytest.raises(spmdzero.SpmdZeroRuntimeError, match="LIBTPU_INIT_ARGS='--xla_tpu_use"):
        flags.apply("v6e")
    monkeypatch.setattr(flags, "tpu_generation", lambda: "v6e")
    with pytest.raises(spmdzero.SpmdZeroRuntimeError, match="LIBTPU_INIT_ARGS='--xla_tpu_use"):
        flags.apply("auto")


def test_on_cpu_auto_says_nothing(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        flags.apply("auto")
    assert caplog.records == []
