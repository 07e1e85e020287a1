"""Bytes of the host's memory in a compiled program.

`v5e_host_memory.txt` is what libtpu 0.0.21 made of this, x and its results vectors of 16 MiB:

    def step(kept, x):  # kept in pinned_host, both donated
        a = sin(x); b = cos(a); on_host = to_host(a), to_host(b)
        y = sin(cos(exp(b)) * to_device(on_host[1])) * to_device(on_host[0]) + to_device(kept)
        return to_host(y), cos(y)

Of it the compiler says 16 MiB of inputs on the host, all aliased, and 32 MiB of temporaries.
"""

from pathlib import Path

import pytest

from spmdzero.hlo import entry_argument_bytes, parse, peak_temporary_bytes

pytestmark = pytest.mark.backends("any")

TEXT = (Path(__file__).parents[1] / "data/hlo/v5e_host_memory.txt").read_text()
VECTOR = 16 * 2**20


def test_inputs_rest_in_one_memory_or_the_other() -> None:
    assert entry_argument_bytes(TEXT) == VECTOR
    assert entry_argument_bytes(TEXT, on_host=True) == VECTOR


def test_what_is_kept_on_the_host_counts_there_from_its_copy_to_its_last_read() -> None:
    # A donated input's place, which the new value takes, counts once: among the inputs.
    assert peak_temporary_bytes(TEXT, on_host=True) == 2 * VECTOR
    all_on_the_device = TEXT.replace("S(5)", "")
    assert peak_temporary_bytes(all_on_the_device, on_host=True) == 0
    assert entry_argument_bytes(all_on_the_device) == 2 * VECTOR


def test_a_layout_says_which_memory_a_value_is_in() -> None:
    module = parse(TEXT)
    entry = module.computations[module.entry]
    start, done = entry["copy-start.3"], entry["copy-done.3"]
    assert [shape.on_host for shape in start.shapes] == [True, False, False]
    assert [shape.on_host for shape in done.shapes] == [True]
    # A shape is the same wherever it is.
    assert done.shapes[0] == entry["cosine.0"].shapes[0]
    assert module.aliased_outputs == (0, 1)
