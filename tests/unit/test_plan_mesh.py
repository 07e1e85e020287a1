import pytest

from spmdzero.errors import SpmdZeroConfigError
from spmdzero.plan import MeshSpec


def test_fsdp_takes_every_device_that_the_data_axis_leaves():
    mesh = MeshSpec.resolve({"fsdp": -1, "data": 2}, device_count=8)
    assert mesh == MeshSpec((("data", 2), ("fsdp", 4)))
    assert (mesh.names, mesh.shape) == (("data", "fsdp"), (2, 4))
    assert (mesh.size, mesh.data, mesh.fsdp) == (8, 2, 4)


def test_data_axis_can_be_the_open_one():
    assert MeshSpec.resolve({"data": -1, "fsdp": 4}, device_count=12).data == 3


def test_mesh_without_a_data_axis_has_one_copy_of_the_states():
    mesh = MeshSpec.resolve({"fsdp": 8}, device_count=8)
    assert (mesh.names, mesh.data, mesh.size) == (("fsdp",), 1, 8)


@pytest.mark.parametrize("axes", [{"fsdp": 6}, {"data": 3, "fsdp": 2}, {"data": 6, "fsdp": -1}])
def test_sizes_that_do_not_fit_the_devices_are_refused_with_both_numbers(axes):
    with pytest.raises(SpmdZeroConfigError, match=r"multiply to 6, there are 8 devices") as caught:
        MeshSpec.resolve(axes, device_count=8)
    assert caught.value.key == "spmd.mesh"


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"data": -1, "fsdp": -1}, "both -1"),
        ({"tensor": 2, "fsdp": -1}, "no mesh axis 'tensor'"),
        ({"data": 8}, "fsdp axis, which is missing"),
        ({}, "fsdp axis, which is missing"),
        ({"fsdp": 0}, "'fsdp' has 0 devices"),
        ({"data": 0, "fsdp": -1}, "'data' has 0 devices"),
        ({"data": -2, "fsdp": -4}, "'data' has -2 devices"),
    ],
)
def test_meshes_without_meaning_are_refused(axes, reason):
    with pytest.raises(SpmdZeroConfigError, match=reason) as caught:
        MeshSpec.resolve(axes, device_count=8)
    assert caught.value.key == "spmd.mesh"


@pytest.mark.parametrize(
    "axes", [(("fsdp", 2), ("data", 2)), (("fsdp", 2), ("fsdp", 2)), (("data", 2), ("data", 2))]
)
def test_axes_out_of_order_or_twice_are_refused(axes):
    with pytest.raises(SpmdZeroConfigError):
        MeshSpec(axes)
