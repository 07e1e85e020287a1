"""What the flag sets change in the program that the TPU's compiler makes, without a TPU."""

from collections import Counter

import pytest

import spmdzero
from spmdzero.engine import StepGraph
from spmdzero.explain import Topology, compile_for_tpu
from spmdzero.inspect import CollectiveLedger
from spmdzero.xla import DeviceMesh, flags
from tests.audit.models import config
from tests.support.contract import make_batch, make_model


def moved(program: bytes, flag_set: str) -> Counter[str]:
    """Bytes per device of each kind of collective on v6e:2x4; ``sliced`` is a scattered sum."""
    compiled = compile_for_tpu(
        program, Topology.parse("v6e:2x4"), flags=dict(flags.flags_for(flag_set))
    )
    total: Counter[str] = Counter()
    for c in CollectiveLedger.from_hlo(compiled.hlo).collectives:
        total["sliced" if c.scattered and c.kind == "all-reduce" else c.kind] += c.bytes
    return total


@pytest.mark.slow
def test_on_v6e_the_set_turns_sums_of_small_matrices_into_scatters(mesh: DeviceMesh) -> None:
    engine, *_ = spmdzero.initialize(model=make_model(), config=config())
    programs: list[bytes] = []

    def read(graph: StepGraph) -> None:
        programs.append(graph.annotated())

    with engine.observe(read):
        engine.train_batch(iter([make_batch(0, 0)]))
    without, with_set = moved(programs[0], "v5e"), moved(programs[0], "v6e")
    # 32 KiB of gradients are no longer summed whole, and nothing is permuted for it.
    assert without["sliced"] - with_set["sliced"] == 32_768
    assert without["collective-permute"] > 0
    assert with_set["collective-permute"] == 0
    # The numbers of parameters and states are gathered as before.
    assert with_set["all-gather"] == without["all-gather"]
