"""A program for TPUs is traced on CPUs: what XLA's CPU compiler needs in it isn't compiled."""

import re

import pytest
import torch

from spmdzero.explain import Topology, compile_for_tpu
from spmdzero.explain._trace import trace_step
from tests.audit.models import Sound, batches, config, engine_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_gradient_is_divided_by_one_on_a_tpu(mesh: object, dtype: torch.dtype) -> None:
    engine = engine_of(Sound(), config(bf16={"enabled": dtype == torch.bfloat16}))
    (program,) = trace_step(engine, batches(1, dtype)[0])
    divided = r"zero\.gradient/a\.weight[^/]*/aten__div"
    assert re.search(divided.encode(), program.annotated.proto)
    made = compile_for_tpu(program.annotated, Topology.parse("v5e:2x4"))
    assert made.hlo is not None
    operations = re.findall(r'op_name="([^"]*)"', made.hlo)
    assert any("zero.gradient/a.weight" in name for name in operations)
    assert not [name for name in operations if re.search(divided, name)]
