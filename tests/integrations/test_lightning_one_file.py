"""Lightning's own converter makes one file of a folder that the strategy saved."""

from pathlib import Path

import pytest

from tests.support.processes import run_python

pytestmark = pytest.mark.backends("any")


def test_lightnings_converter_reads_a_saved_folder(tmp_path: Path) -> None:
    module = "tests.integrations.lightning_one_file"
    printed = run_python("-m", module, str(tmp_path), devices=2)
    assert printed.splitlines()[-1] == "one file of ['body.bias', 'body.weight']"
