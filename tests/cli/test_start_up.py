"""What a command, and `import spmdzero`, imports: torch takes seconds, so not without a use for it.

Each is a process of its own, with nothing imported before.
"""

import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest

from spmdzero.cli._convert import convert
from spmdzero.formats import FORMATS
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

# What imports one of them has imported torch, or waits as long for another of its kind.
HEAVY = {"torch", "torch_xla", "jax", "numpy", "transformers"}
COMMAND = """
import json, sys
from spmdzero.cli import app
try:
    app(sys.argv[1:])
except SystemExit as ended:
    print(json.dumps([ended.code, sorted({n.partition(".")[0] for n in sys.modules})]))
"""


def imported(*arguments: str) -> set[str]:
    """The packages that a command which succeeds has imported."""
    *_, last = run_python("-c", COMMAND, *arguments, fresh=True).splitlines()
    status, packages = json.loads(last)
    assert status == 0
    return set(packages)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["explain", "--help"]])
def test_help_and_version_import_no_torch(arguments: list[str]) -> None:
    assert imported(*arguments) & HEAVY == set()


def test_check_imports_no_torch_and_its_status_says_whether_a_key_is_refused(
    tmp_path: Path,
) -> None:
    config = tmp_path / "ds.json"
    for stage, status in ((2, 0), (4, 1)):
        config.write_text(
            json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": stage}})
        )
        *printed, last = run_python("-c", COMMAND, "check", str(config), fresh=True).splitlines()
        ended, packages = json.loads(last)
        assert ended == status
        assert printed[0] == f"ds.json: {status} refused, 0 without effect, {2 - status} honoured"
        assert set(packages) & HEAVY == set()
    assert '    write: "stage": 2' in printed


USES = """
import json, pickle, sys
import torch
before = set(sys.modules)
import spmdzero
alone = set(sys.modules) - before
# Packages below with the names of functions, imported before anybody asks for the function.
from spmdzero.audit import AuditReport
from spmdzero.explain import Topology
report = pickle.loads(pickle.dumps(AuditReport(findings=(), steps=1, programs=())))
shown = str(report)
functions = [spmdzero.audit.__name__, spmdzero.explain.__name__]
import spmdzero as deepspeed
paths = [deepspeed.zero.Init.__name__, deepspeed.runtime.lr_schedules.WarmupLR.__name__]
star = {}
exec("from spmdzero import *", star)
whole = set(sys.modules) - before
print(json.dumps({
    "alone": sorted(name for name in alone if name.partition(".")[0] != "spmdzero"),
    "shown": shown, "functions": functions, "paths": paths,
    "compiler": sorted(whole & {"torch._dynamo", "torch.distributed.checkpoint"}),
    "not in star": sorted(set(spmdzero.__all__) - set(star)),
    "not in dir": sorted({*spmdzero.__all__} - {*dir(spmdzero)}),
    "version": spmdzero.__version__,
}))
"""


@pytest.fixture(scope="module")
def uses() -> dict:
    return json.loads(run_python("-c", USES, fresh=True))


def test_importing_spmdzero_costs_a_few_small_modules_above_torch(uses: dict) -> None:
    assert uses["alone"] == []


def test_all_of_spmdzero_imports_neither_torchs_compiler_nor_its_checkpoints(uses: dict) -> None:
    assert uses["compiler"] == []


def test_a_function_is_found_though_the_package_of_its_name_was_imported_first(uses: dict) -> None:
    assert uses["functions"] == ["audit", "explain"]


def test_each_public_name_is_there_when_it_is_asked_for(uses: dict) -> None:
    assert uses["not in star"] == uses["not in dir"] == []
    assert uses["paths"] == ["Init", "WarmupLR"]
    assert uses["version"].count(".") == 2


def test_what_is_shown_first_finds_its_renderer(uses: dict) -> None:
    assert uses["shown"].startswith("audit of 1 step")


def test_the_help_of_convert_names_each_format() -> None:
    option = get_type_hints(convert, include_extras=True)["to"].__metadata__[0]
    assert tuple(re.split(r", | or ", option.help)) == FORMATS
