"""What the flag sets change in the program that the TPU's compiler makes, without a TPU."""

from collections import Counter

import pytest

import spmdzero
from spmdzero.backend import AnnotatedProgram
from spmdzero.backend.torch_xla import DeviceMesh, flags
from spmdzero.engine import StepGraph
from spmdzero.explain import Topology, compile_for_tpu
from spmdzero.inspect import CollectiveLedger
from tests.audit.models import config
from tests.support.contract import make_batch, make_model

pytestmark = pytest.mark.backends("torch_xla")


def moved(program: AnnotatedProgram, flag_set: str) -> Counter[str]:
    """Bytes per device of each kind of collective on v6e:2x4; ``sliced`` is a scattered sum."""
    compiled = compile_for_tpu(
        program, Topology.parse("v6e:2x4"), flags=dict(flags.flags_for(flag_set))
    )
    assert compiled.hlo is not None
    return by_kind(CollectiveLedger.from_hlo(compiled.hlo))


def by_kind(ledger: CollectiveLedger) -> Counter[str]:
    total: Counter[str] = Counter()
    for c in ledger.collectives:
        total["sliced" if c.scattered and c.kind == "all-reduce" else c.kind] += c.bytes
    return total


@pytest.mark.slow
def test_on_v6e_the_set_turns_sums_of_small_matrices_into_scatters(mesh: DeviceMesh) -> None:
    engine, *_ = spmdzero.initialize(model=make_model(), config=config())
    programs: list[AnnotatedProgram] = []

    def read(graph: StepGraph) -> None:
        programs.append(graph.annotated())

    with engine.observe(read):
        engine.train_batch(iter([make_batch(0, 0)]))
    without, with_set = moved(programs[0], "none"), moved(programs[0], "v6e")
    # 32 KiB of gradients are no longer summed whole, and nothing is permuted for it.
    assert without["sliced"] - with_set["sliced"] == 32_768
    assert without["collective-permute"] > 0
    assert with_set["collective-permute"] == 0
    # The numbers of parameters and states are gathered as before.
    assert with_set["all-gather"] == without["all-gather"]


@pytest.mark.slow
def test_explain_compiles_with_the_configs_set_and_shows_its_flags(mesh: DeviceMesh) -> None:
    def explained(flag_set: str) -> spmdzero.Explanation:
        cfg = config(spmd={"xla_flags": flag_set})
        return spmdzero.explain(make_model(), cfg, make_batch(0, 0), tpu=["v6e:2x4"], stages=())

    without, with_set = explained("none"), explained("v6e")
    (plain,), (flagged,) = (e.moves_on("v6e:2x4").programs for e in (without, with_set))
    assert by_kind(plain.ledger)["sliced"] - by_kind(flagged.ledger)["sliced"] == 32_768
    flag = "xla_tpu_use_minor_sharding_for_major_trivial_input=true"
    assert flag in with_set.xla_flags
    assert flag in str(with_set)
    assert flag not in without.xla_flags
