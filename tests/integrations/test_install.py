"""`install()`: the name `deepspeed`, its modules and its metadata, for one process."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.processes import ROOT, environment, run_python

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")


def test_every_path_of_deepspeed_is_spmdzeros() -> None:
    run_python("-W", "error", "-c", textwrap.dedent("""
        import spmdzero.integrations
        spmdzero.integrations.install()
        spmdzero.integrations.install()
        import importlib.metadata
        from importlib.util import find_spec

        assert find_spec("deepspeed") is not None
        assert importlib.metadata.version("deepspeed") == "0.19.8"
        assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"

        import deepspeed
        import spmdzero
        from deepspeed.ops.adam import FusedAdam
        from deepspeed.runtime.lr_schedules import WarmupLR
        import deepspeed.comm as dist

        assert deepspeed.__version__ == "0.19.8"
        assert (deepspeed.__version_minor__, deepspeed.__git_hash__) == (19, "unknown")
        assert dist is spmdzero.comm
        assert deepspeed.runtime.lr_schedules.WarmupLR is WarmupLR
        assert deepspeed.DeepSpeedEngine is spmdzero.Engine
        for refused in ("deepspeed.moe.mappings", "deepspeed.runtime.zero.stage3"):
            try:
                importlib.import_module(refused)
            except ModuleNotFoundError as error:
                assert len(str(error)) > 60, error
            else:
                raise AssertionError(refused)
        try:
            import deepspeed.plan
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError("a module of ours only")
        try:
            deepspeed.init_inference
            deepspeed.init_inference(None)
        except spmdzero.SpmdZeroUsageError as error:
            assert "inference" in str(error)

        from accelerate.utils import is_deepspeed_available, is_torch_xla_available
        from transformers.utils import is_torch_xla_available as theirs
        assert is_deepspeed_available() and not is_torch_xla_available() and not theirs()
    """))  # fmt: skip


def printed(script: str, folder: Path, module: str, content: str) -> str:
    """What a script prints after `install()`, that finds a module of diffusers with this content.

    diffusers isn't among the tests' packages.
    """
    path = folder.joinpath("diffusers", *module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    for package in {folder / "diffusers", path.parent}:
        (package / "__init__.py").write_text("")
    path.write_text(content)
    begun = (
        "import sys, spmdzero.integrations; spmdzero.integrations.install()\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
    )
    return run_python("-c", begun + script).strip()


def test_diffusers_leaves_an_installed_torch_xla_alone(tmp_path: Path) -> None:
    # This is how it looks for torch_xla.
    content = (
        "import importlib.util\n"
        "_torch_xla_available = importlib.util.find_spec('torch_xla') is not None\n"
        "def is_torch_xla_available():\n    return _torch_xla_available\n"
    )
    script = (
        "from diffusers.utils.import_utils import is_torch_xla_available as found\nprint(found())"
    )
    assert printed(script, tmp_path, "utils.import_utils", content) == "False"


def test_diffusers_moving_averages_find_deepspeed(tmp_path: Path) -> None:
    # As its EMAModel at stage 3, whose name is imported where a stage is known before: nowhere.
    content = "def gathered(p):\n    return deepspeed.zero.GatheredParameters(p)\n"
    script = (
        "import torch\n"
        "from diffusers.training_utils import gathered\n"
        "with gathered([torch.nn.Parameter(torch.ones(2))]):\n    print('gathered')"
    )
    assert printed(script, tmp_path, "training_utils", content) == "gathered"


def refusal(script: str, **variables: str) -> str:
    told = environment(**variables)
    # On JAX the tests' own process is told so before it imports a client.
    told.pop("USE_TORCH_XLA", None)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=told,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_a_client_with_a_backend_of_its_own_is_refused() -> None:
    said = refusal(
        "import accelerate, spmdzero.integrations; spmdzero.integrations.install()",
        PJRT_DEVICE="CPU",
    )
    assert "accelerate was imported before" in said
    assert "Call spmdzero.integrations.install() before `import accelerate`" in said
    assert "spmdzero run" in said
