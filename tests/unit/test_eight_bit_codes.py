"""Codes of optimizer states in 8 bits, beside bitsandbytes' table, and where their scales live."""

import numpy as np
import pytest
import torch

from spmdzero.optim import decoded, encoded, recoded, values_of_codes, zero_code
from spmdzero.plan import MeshSpec, ParamSpec, Role, ShardingPlan
from tests.oracle import eight_bit_states as recorded

pytestmark = pytest.mark.backends("any")

SIGNS = pytest.mark.parametrize("signed", [True, False])


def table(signed: bool) -> torch.Tensor:
    return torch.from_numpy(np.load(recorded.DATA)[f"table/{signed}"])


@SIGNS
def test_values_of_codes_are_the_tables(signed: bool) -> None:
    ours = values_of_codes(torch.arange(256, dtype=torch.uint8), signed=signed)
    # Two roundings of fp32, and two of the table's own.
    torch.testing.assert_close(ours, table(signed), rtol=3e-7, atol=0)
    assert ours[zero_code("exp_avg" if signed else "exp_avg_sq")] == 0
    assert ours[255] == 1


@SIGNS
def test_codes_are_the_nearest_of_the_table(signed: bool) -> None:
    values = torch.cat([recorded.values(signed=signed)] * 4)
    codes, scales = encoded(values, scales=(12, 1, 2), signed=signed)
    blocks = torch.cat([values, torch.zeros(12, 212)], dim=1).reshape(12, 2, 256)
    assert torch.equal(scales, blocks.abs().amax(-1).unsqueeze(1))
    known = table(signed).double()
    scaled = blocks.double() / scales.reshape(12, 2, 1).clamp(min=1e-30)
    nearest = torch.bucketize(scaled, (known[1:] + known[:-1]) / 2).reshape(12, 512)[:, :300]
    assert torch.equal(codes.int(), nearest.int())
    back = decoded(codes, scales, signed=signed)
    wanted = known[nearest] * scales.reshape(12, 2).repeat_interleave(256, 1)[:, :300]
    torch.testing.assert_close(back.double(), wanted, rtol=4e-7, atol=0)


@SIGNS
def test_values_of_codes_become_the_same_codes_again(signed: bool) -> None:
    values = recorded.values(signed=signed)
    for shape in ((3, 1, 2), (8, 1), (1, 4), (3, 2, 1)):
        codes, scales = encoded(values, scales=shape, signed=signed)
        values_again = decoded(codes, scales, signed=signed)
        again, scales_again = recoded(values_again, scales=shape, signed=signed)
        assert torch.equal(decoded(again, scales_again, signed=signed) != 0, values_again != 0)
        # A block of zeros has no code that is the only one.
        whole = values != 0
        assert torch.equal(codes[whole], again[whole])
        torch.testing.assert_close(scales_again, scales, rtol=2e-7, atol=0)


def plan(shape: tuple[int, ...], *, fsdp: int = 8, tensor: int = 1, **more: object) -> ShardingPlan:
    mesh = MeshSpec.resolve({"fsdp": fsdp, "tensor": tensor}, device_count=fsdp * tensor)
    param = ParamSpec(
        name="w", shape=shape, dtype="float32", trainable=True, eight_bits=("exp_avg",), **more
    )
    return ShardingPlan.build(
        [param], stage=2, mesh=mesh, master=True, moments=("exp_avg",),
        accumulator_dtype=None, accumulation_steps=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "scales", "local", "more"),
    [
        # Rows that 256 divides, whichever dim is split.
        ((64, 512), (64, 1, 2), (8, 1, 2), {}),
        ((7, 4096), (7, 8, 2), (7, 1, 2), {}),
        # Rows that it doesn't divide: the elements of a device in order, or of its part of a row.
        ((64, 300), (8, 10), (1, 10), {}),
        ((7, 800), (7, 8, 1), (7, 1, 1), {}),
        ((16, 16, 3, 3), (8, 2), (1, 2), {}),
        # Flat, and padded: 91 x 91 of 8 parts of 1,036.
        ((91, 91), (8, 5), (1, 5), {}),
        # Whole on every device.
        ((9,), (1, 1), (1, 1), {}),
        # A part of each row is on a device of the tensor axis.
        ((64, 512), (64, 2, 1), (16, 1, 1), {"fsdp": 4, "tensor": 2, "tensor_dim": 1}),
    ],
)
def test_scales_are_where_their_blocks_are(
    shape: tuple[int, ...], scales: tuple[int, ...], local: tuple[int, ...], more: dict[str, int]
) -> None:
    found = plan(shape, **more)
    layout = found.at_rest("exp_avg_absmax/w")
    assert (layout.stored, layout.local) == (scales, local)
    assert found.in_eight_bits == {"exp_avg/w": scales}
    assert found.slots(found["w"]) == {"exp_avg": "uint8", "exp_avg_absmax": "float32"}
    codes = found.at_rest("exp_avg/w").local
    sizes = [int(np.prod(part)) for part in (codes, local)]
    assert found.memory()[Role.MOMENT] == sizes[0] + 4 * sizes[1]
    assert ShardingPlan.from_json(found.to_json()) == found
    assert found.compare().paper is None
