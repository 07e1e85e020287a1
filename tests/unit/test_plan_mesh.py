import pytest

from spmdzero.errors import SpmdZeroConfigError
from spmdzero.plan import MeshSpec

pytestmark = pytest.mark.backends("any")


def test_fsdp_takes_every_device_that_the_data_axis_leaves():
    mesh = MeshSpec.resolve({"fsdp": -1, "data": 2}, device_count=8)
    assert mesh == MeshSpec((("data", 2), ("fsdp", 4)))
    assert (mesh.names, mesh.shape) == (("data", "fsdp"), (2, 4))
    assert (mesh.size, mesh.replicas, mesh.data, mesh.fsdp) == (8, 8, 2, 4)


def test_data_axis_can_be_the_open_one():
    assert MeshSpec.resolve({"data": -1, "fsdp": 4}, device_count=12).data == 3


def test_mesh_without_a_data_axis_has_one_copy_of_the_states():
    mesh = MeshSpec.resolve({"fsdp": 8}, device_count=8)
    assert (mesh.names, mesh.data, mesh.size) == (("fsdp",), 1, 8)


def test_a_group_shares_the_parameters_and_all_devices_the_states():
    mesh = MeshSpec.resolve({"fsdp": -1}, device_count=8, group=4)
    assert mesh == MeshSpec((("data", 2), ("fsdp", 4)), ("fsdp", "data"))
    assert (mesh.fsdp, mesh.shards, mesh.data, mesh.replicas) == (4, 8, 2, 8)
    assert mesh == MeshSpec.resolve({"data": 2, "fsdp": 4}, device_count=8, group=4)
    for group in (0, 1, 8, 64):
        alone = MeshSpec.resolve({"fsdp": -1}, device_count=8, group=group)
        assert alone == MeshSpec((("fsdp", 8),))
        assert alone.shards == 8


def test_devices_that_share_rows_share_the_states_and_not_the_parameters():
    mesh = MeshSpec.resolve({"fsdp": -1, "sequence": 2}, device_count=8)
    assert (mesh.fsdp, mesh.shards, mesh.replicas) == (4, 8, 4)
    # The region divides a tensor by replicas, the compiler what is left.
    assert (mesh.states, mesh.states_of_region) == (("fsdp", "sequence"), "fsdp")
    assert str(mesh) == "fsdp=4, sequence=2, states over fsdp and sequence"


@pytest.mark.parametrize("axes", [{"fsdp": 6}, {"data": 3, "fsdp": 2}, {"data": 6, "fsdp": -1}])
def test_sizes_that_do_not_fit_the_devices_are_refused_with_both_numbers(axes):
    with pytest.raises(SpmdZeroConfigError, match=r"multiply to 6, there are 8 devices") as caught:
        MeshSpec.resolve(axes, device_count=8)
    assert caught.value.key == "spmd.mesh"


def test_meshes_without_meaning_are_refused():
    rows = [
        ({"data": -1, "fsdp": -1}, "'data' has -1 devices"),
        (
            {"tensor": 2},
            "the mesh axes are 'fsdp', before it 'data' and behind it 'sequence' and 'tensor'",
        ),
        ({"model": 2, "fsdp": -1}, "the mesh axes are 'fsdp', before it 'data'"),
        ({"data": 8}, "the mesh axes are 'fsdp'"),
        ({}, "the mesh axes are 'fsdp'"),
        ({"fsdp": 0}, "'fsdp' has 0 devices"),
        ({"data": 0, "fsdp": -1}, "'data' has 0 devices"),
        ({"data": -2, "fsdp": -4}, "'data' has -2 devices"),
    ]
    for axes, reason in rows:
        with pytest.raises(SpmdZeroConfigError, match=reason) as caught:
            MeshSpec.resolve(axes, device_count=8)
        assert caught.value.key == "spmd.mesh"
    for twice in ((("fsdp", 2), ("data", 2)), (("fsdp", 2), ("fsdp", 2))):
        with pytest.raises(SpmdZeroConfigError, match="each once"):
            MeshSpec(twice)
