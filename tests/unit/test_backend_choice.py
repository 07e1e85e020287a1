"""One backend a process: who chooses it, what chooses it, and what is said where it can't be.

Stand-ins are the backends here, in processes of their own: what is at stake is which one is taken.
"""

import atexit
import functools
import json
import subprocess
import sys
import textwrap

import pytest

from tests.support.processes import ROOT, environment, run_python

pytestmark = pytest.mark.backends("any")

# Forks of a process that has imported spmdzero, and so no backend: one for each line of JSON.
SERVER = """
import importlib.machinery, json, os, sys, traceback, types
import spmdzero, spmdzero.integrations._initialize
from spmdzero.backend import choice_in_words, choose, current
from spmdzero.backend._current import require_processes
from spmdzero.errors import SpmdZeroError

class Installed:
    # What Python finds is installed.
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            return importlib.machinery.ModuleSpec(name, self, origin="a stand-in")

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        pass

def only_installed(names):
    sys.meta_path.insert(0, Installed(names))
    for name in ("torch_xla", "jax"):
        # It doesn't find a name that stands for None.
        sys.modules.pop(name, None)
        if name not in names:
            sys.modules[name] = None
        stand_in = types.ModuleType("spmdzero.backend." + name)
        stand_in.BACKEND = types.SimpleNamespace(name=name)
        sys.modules[stand_in.__name__] = stand_in

def show(function, *args):
    try:
        print(function(*args).name)
    except SpmdZeroError as error:
        print(type(error).__name__, error)

for line in sys.stdin:
    job = json.loads(line)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(writer, sys.stdout.fileno())
        os.environ.update(job["variables"])
        only_installed(job["installed"])
        try:
            exec(job["code"], globals())
        except BaseException:
            print(traceback.format_exc())
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with open(reader) as printed:
        print(json.dumps(printed.read()), flush=True)
    os.wait()
"""


@functools.cache
def server() -> subprocess.Popen[str]:
    """It ends with its input, at the end of the tests."""
    told = environment()
    told.pop("SPMDZERO_BACKEND", None)
    started = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=ROOT, env=told, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(started.communicate)
    return started


def printed(code: str, *installed: str, backend: str | None = None) -> list[str]:
    """The lines that `code` prints in a process where only those are installed."""
    variables = {} if backend is None else {"SPMDZERO_BACKEND": backend}
    job = {"code": textwrap.dedent(code), "installed": installed, "variables": variables}
    pipes = server()
    assert pipes.stdin is not None
    assert pipes.stdout is not None
    print(json.dumps(job), file=pipes.stdin, flush=True)
    return json.loads(pipes.stdout.readline()).splitlines()


def test_importing_spmdzero_imports_no_backend() -> None:
    found = run_python(
        "-c",
        "import sys, spmdzero, spmdzero.cli, spmdzero.integrations, spmdzero.nn\n"
        "print({n.split('.')[0] for n in sys.modules} & {'torch_xla', 'jax', 'jaxlib', 'libtpu'})",
        fresh=True,
    )
    assert found == "set()\n"


@pytest.mark.parametrize(
    ("there", "variable", "asked", "taken"),
    [
        (("torch_xla", "jax"), None, "auto", "jax"),
        (("jax",), None, "auto", "jax"),
        (("torch_xla",), None, "auto", "torch_xla"),
        (("torch_xla", "jax"), "torch_xla", "auto", "torch_xla"),
        (("torch_xla", "jax"), "auto", "auto", "jax"),
        (("torch_xla", "jax"), "", "auto", "jax"),
        (("torch_xla", "jax"), "jax", "torch_xla", "torch_xla"),
        (("torch_xla", "jax"), None, "jax", "jax"),
        # What the config asks for is taken before the variable is looked at.
        (("torch_xla", "jax"), "jxa", "jax", "jax"),
    ],
)
def test_the_config_is_asked_first_then_the_variable_then_what_is_installed(
    there: tuple[str, ...], variable: str | None, asked: str, taken: str
) -> None:
    code = f"show(choose, {asked!r})\nshow(current)\nshow(choose, 'auto')\nshow(choose, {taken!r})"
    assert printed(code, *there, backend=variable) == [taken] * 4


def test_a_process_that_has_imported_torch_xla_takes_it() -> None:
    code = "import torch_xla\nshow(current)\nprint(choice_in_words())"
    taken, said = printed(code, "torch_xla", "jax")
    assert taken == "torch_xla"
    assert said.startswith("torch_xla (this process has imported it; SPMDZERO_BACKEND=jax or ")


def test_a_process_has_one_backend() -> None:
    first, error, still = printed(
        "show(current)\nshow(choose, 'torch_xla')\nshow(current)", "torch_xla", "jax"
    )
    assert (first, still) == ("jax", "jax")
    assert error == (
        "SpmdZeroConfigError spmd.backend = 'torch_xla': this process uses jax already "
        "(installed), and a process has one backend. Set SPMDZERO_BACKEND=torch_xla before Python "
        "starts, or use a process for each."
    )


def test_processes_of_the_cpu_that_could_take_torch_xla_alone_are_refused() -> None:
    code = """
    try:
        print(require_processes({}, platform="CPU"))
    except SpmdZeroError as error:
        print(error)
    """
    assert printed(code, "torch_xla", "jax") == ["None"]
    (said,) = printed(code, "torch_xla")
    assert said.startswith("torch_xla is the only backend installed. torch_xla's runtime of the ")
    assert "pip install 'spmdzero[jax]', and then set SPMDZERO_BACKEND=jax for all" in said


@pytest.mark.parametrize(
    ("there", "variable", "asked", "said"),
    [
        ((), None, "auto",
         "SpmdZeroRuntimeError spmdzero needs torch_xla or JAX, and neither is installed. "
         "pip install 'spmdzero[jax]', or: pip install 'spmdzero[xla]'"),
        (("torch_xla",), None, "jax",
         "SpmdZeroConfigError spmd.backend = 'jax': jax is not installed. "
         "pip install 'spmdzero[jax]'."),
        (("jax",), None, "torch_xla",
         "SpmdZeroConfigError spmd.backend = 'torch_xla': torch_xla is not installed. "
         "pip install 'spmdzero[xla]'."),
        (("jax",), "torch_xla", "auto",
         "SpmdZeroRuntimeError SPMDZERO_BACKEND=torch_xla: torch_xla is not installed. "
         "pip install 'spmdzero[xla]'"),
        (("torch_xla", "jax"), "torch-xla", "auto",
         "SpmdZeroRuntimeError SPMDZERO_BACKEND=torch-xla: there is no such backend. "
         "Did you mean 'torch_xla'?"),
        (("torch_xla", "jax"), "tensorflow", "auto",
         "SpmdZeroRuntimeError SPMDZERO_BACKEND=tensorflow: there is no such backend. "
         "It is one of jax, torch_xla, auto"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_an_error_that_says_what_to_do(
    there: tuple[str, ...], variable: str | None, asked: str, said: str
) -> None:
    assert printed(f"show(choose, {asked!r})", *there, backend=variable) == [said]


def test_a_backend_that_could_not_be_taken_leaves_the_process_free() -> None:
    lines = printed("show(choose, 'jax')\nshow(choose, 'torch_xla')", "torch_xla")
    assert lines[0].startswith("SpmdZeroConfigError")
    assert lines[1] == "torch_xla"


@pytest.mark.parametrize(
    ("there", "variable", "said"),
    [
        (("torch_xla", "jax"), None,
         'jax (installed; SPMDZERO_BACKEND=torch_xla or "spmd": {"backend": "torch_xla"} chooses '
         "torch_xla)"),
        (("torch_xla", "jax"), "torch_xla",
         'torch_xla (SPMDZERO_BACKEND=torch_xla; SPMDZERO_BACKEND=jax or "spmd": {"backend": '
         '"jax"} chooses jax)'),
        (("jax",), None, "jax (the only one installed)"),
    ],
)  # fmt: skip
def test_the_choice_in_words(there: tuple[str, ...], variable: str | None, said: str) -> None:
    assert printed("print(choice_in_words())", *there, backend=variable) == [said]


ENTRIES = {
    "initialize": "spmdzero.initialize(model=model, config=config)",
    "explain": "spmdzero.explain(model, config, (torch.ones(8, 2),))",
    "DeepSpeedConfig": "spmdzero.DeepSpeedConfig(config)",
    "client": "initialize_for_client(model=model, config=config)",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_takes_a_config_takes_its_backend_before_it_touches_a_device(entry: str) -> None:
    # The stand-in has no part of a backend, so the first touch ends it.
    lines = printed(
        f"""
        import torch, spmdzero
        from spmdzero.integrations._initialize import initialize_for_client
        model = torch.nn.Linear(2, 2)
        config = {{"train_batch_size": 8, "spmd": {{"backend": "torch_xla"}}}}
        try:
            {ENTRIES[entry]}
        except AttributeError as error:
            print(error)
        show(current)
        """,
        "torch_xla",
        "jax",
    )
    assert lines[0].startswith("'types.SimpleNamespace' object has no attribute")
    assert lines[1] == "torch_xla"


def test_an_unknown_backend_in_the_config_is_refused_with_its_key() -> None:
    lines = printed(
        """
        from spmdzero.config import load_config
        show(load_config, {"train_batch_size": 8, "spmd": {"backend": "tpu"}})
        """,
        "torch_xla",
    )
    assert lines[0].startswith("SpmdZeroConfigError spmd.backend = 'tpu': this is not")
