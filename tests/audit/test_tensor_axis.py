"""What the audit says of collectives among devices that share a replica's work."""

import pytest

from spmdzero.audit._collectives import ReadProgram

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

HLO = """\
HloModule step, num_partitions=4

ENTRY %step (p: f32[4,8]) -> f32[4,16] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %g = f32[4,16]{1,0} all-gather(%p), channel_id=1, replica_groups=GROUPS, dimensions={1}, \
use_global_device_ids=true, metadata={op_name="jit(run)/module/.0/aten__cat/concatenate"}
}
"""


@pytest.mark.parametrize(
    ("groups", "sizes", "name"),
    [
        ("{{0,1},{2,3}}", {"tensor": 2}, "gathered-over-tensor"),
        ("{{0,1},{2,3}}", {"sequence": 2}, "gathered-over-sequence"),
        ("{{0,2},{1,3}}", {"tensor": 2}, "stray-activation-collective"),
        ("{{0,2},{1,3}}", {"sequence": 2}, "stray-activation-collective"),
        ("{{0,1},{2,3}}", {}, "stray-activation-collective"),
    ],
)
def test_a_gather_is_named_by_the_axis_that_it_goes_over(
    groups: str, sizes: dict[str, int], name: str
) -> None:
    program = ReadProgram(HLO.replace("GROUPS", groups), **sizes)
    found = list(program.findings(dtypes={}, where="boundary", communicate=None))
    assert [finding.name for finding in found] == [name]
    assert "f32[4, 16]" in found[0].evidence
