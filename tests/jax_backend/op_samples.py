"""Arguments of the operations that no sample of torch's database dispatches."""

import torch

F32 = torch.arange(1.0, 13.0).reshape(3, 4) / 5 - 1
I64 = torch.tensor([[5, -3, 2, 7], [-8, 6, 1, 4], [3, 3, -2, 9]])
SHIFTS = torch.tensor([[0, 1, 2, 3]])
PLANES = torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
BOXES = torch.linspace(-1, 1, 48).reshape(1, 3, 2, 2, 4)
CHANNEL = torch.tensor([0.5, -1.0, 2.0])
COMPLEX = torch.complex(F32, F32.flip(0))
PLACES = torch.tensor([[0, 1, 1, 2]])
ROWS = torch.linspace(-2, 2, 8 * 16).reshape(8, 16).sin()
GROUPS = torch.linspace(-2, 2, 3 * 16 * 8).reshape(3, 16, 8).sin()
ENDS = torch.tensor([2, 2, 8], dtype=torch.int32)
HEADS = torch.linspace(-2, 2, 2 * 2 * 5 * 4).reshape(2, 2, 5, 4).sin()

# Of what no op of the database dispatches: arguments, by the overload's name.
DIRECT = {
    "__lshift__.Scalar": [(I64, 2)],
    "__lshift__.Tensor": [(I64, SHIFTS)],
    "__rshift__.Scalar": [(I64, 2)],
    "__rshift__.Tensor": [(I64, SHIFTS)],
    "_addmm_activation": [(F32[:, :3], F32, F32.T)],
    "_embedding_bag_forward_only": [
        (F32, torch.tensor([0, 2, 1, 1]), torch.tensor([0, 3]), False, mode) for mode in (0, 1, 2)
    ],
    "_grid_sampler_2d_cpu_fallback": [(PLANES, PLANES[:, :2].movedim(1, 3), 0, 0, False)],
    "_grouped_mm": [
        (ROWS, GROUPS, ENDS),
        (ROWS.bfloat16(), GROUPS.bfloat16(), ENDS),
        (ROWS.T, ROWS, ENDS),
        (GROUPS, ROWS[:, :8], ENDS),
        (GROUPS, GROUPS.transpose(1, 2)),
    ],
    "_index_put_impl": [(F32, [torch.tensor([0, 0])], F32[1:], True)],
    "_native_batch_norm_legit": [
        (PLANES, CHANNEL, CHANNEL, CHANNEL * 0, CHANNEL**2, train, 0.1, 1e-5)
        for train in (True, False)
    ],
    "_native_batch_norm_legit.no_stats": [(PLANES, CHANNEL, None, True, 0.1, 1e-5)],
    "_native_batch_norm_legit_functional": [
        (PLANES, CHANNEL, CHANNEL, CHANNEL * 0, CHANNEL**2, True, 0.1, 1e-5)
    ],
    "_native_batch_norm_legit_no_training": [
        (PLANES, CHANNEL, CHANNEL, CHANNEL, CHANNEL**2, 0.1, 1e-5)
    ],
    "_neg_view": [(F32,)],
    "_neg_view_copy": [(F32,)],
    "_is_all_true": [(I64 > -9,), (I64 > 0,)],
    "_is_any_true": [(I64 > 9,), (I64 > 0,)],
    "_reshape_alias": [(F32, [4, 3], [3, 1])],
    "_reshape_copy": [(F32, [4, -1])],
    "_scaled_dot_product_flash_attention_for_cpu": [
        (HEADS, HEADS.flip(2), HEADS.flip(3), 0.0, causal) for causal in (True, False)
    ],
    "_weight_norm_interface_backward": [
        (F32, F32 + 3, CHANNEL[:, None], (F32 + 3).norm(dim=1, keepdim=True), 0)
    ],
    "_upsample_bicubic2d_aa": [(PLANES, [3, 2], False), (PLANES, [7, 3], True)],
    "_upsample_bicubic2d_aa_backward": [(PLANES, [4, 4], [2, 3, 7, 9], False)],
    "_upsample_nearest_exact2d": [(PLANES, [7, 3]), (PLANES, [6, 2], 1.5, 0.5)],
    "_upsample_nearest_exact2d_backward": [(PLANES, [4, 4], [2, 3, 3, 6])],
    "_upsample_nearest_exact3d": [(BOXES, [3, 5, 2])],
    "_upsample_nearest_exact3d_backward": [(BOXES, [2, 2, 4], [1, 3, 3, 1, 5])],
    "all.dims": [(I64 > 0, [0, 1]), (I64 > 0, [1], True)],
    "argsort": [(I64, 1, True)],
    "argsort.stable": [(I64, True, 1, True)],
    "bitwise_and.Scalar": [(I64, 6)],
    "bitwise_and.Scalar_Tensor": [(6, I64)],
    "bitwise_left_shift.Scalar_Tensor": [(3, SHIFTS)],
    "bitwise_left_shift.Tensor_Scalar": [(I64, 3)],
    "bitwise_or.Scalar": [(I64, 6)],
    "bitwise_or.Scalar_Tensor": [(6, I64)],
    "bitwise_right_shift.Scalar_Tensor": [(300, SHIFTS)],
    "bitwise_right_shift.Tensor_Scalar": [(I64, 1)],
    "bitwise_xor.Scalar": [(I64, 6)],
    "bitwise_xor.Scalar_Tensor": [(6, I64)],
    "bucketize.Scalar": [(0.3, F32[0])],
    "clamp_max": [(F32, 0.2)],
    "conj_physical": [(COMPLEX,)],
    "copysign.Scalar": [(F32, -1.0)],
    "detach_copy": [(F32,)],
    "div.Scalar_mode": [(F32, -0.3, mode) for mode in ("floor", "trunc")]
    + [(I64, 3, mode) for mode in ("floor", "trunc")],
    "fill.Tensor": [(F32, torch.tensor(2))],
    "floor_divide.Scalar": [(I64, -2), (F32, 0.3)],
    "fmod.Scalar": [(I64, -4), (F32, 0.3)],
    "imag": [(COMPLEX,)],
    "lift": [(F32,)],
    "linalg_inv_ex": [(torch.tensor([[4.0, 2.0], [2.0, 2.0]]),)],
    "linalg_lu_factor_ex": [
        (torch.tensor([[4.0, x, 1.0], [2.0, 1.0, 3.0], [0.0, 0.0, 1.0]]),) for x in (2.0, 3.0)
    ],
    "lift_fresh_copy": [(F32,)],
    "linear": [(F32, F32, CHANNEL)],
    "real": [(COMPLEX,)],
    "remainder.Scalar_Tensor": [(7, I64), (-1.5, F32)],
    "replication_pad3d": [(BOXES, [1, 2, 0, 1, 3, 0])],
    "replication_pad3d_backward": [(BOXES, BOXES[:, :, :, :, :2], [1, 1, 0, 0, 0, 0])],
    "scatter.reduce": [(F32, 0, PLACES, F32, how) for how in ("add", "multiply")],
    "scatter.value_reduce": [(F32, 0, PLACES, 3.0, how) for how in ("add", "multiply")],
    "searchsorted.Scalar": [(F32[0], 0.1)],
    "select_copy.int": [(F32, 1, -1)],
    "slice_copy.Tensor": [(F32, 1, -3, None, 2)],
    "sort.stable": [(I64, True, 1, True)],
    "special_zeta.other_scalar": [(F32.abs() + 2, 3.0)],
    "special_zeta.self_scalar": [(3.0, F32.abs() + 2)],
    "split_copy.Tensor": [(F32, 3, 1)],
    "squeeze_copy.dim": [(F32[:1], 0)],
    "squeeze_copy.dims": [(F32[:1], [0, 1])],
    "unsafe_split_with_sizes": [(F32, [1, 3], 1)],
    "upsample_nearest2d": [(PLANES, [7, 3]), (PLANES, [6, 2], 1.5, 0.5)],
    "upsample_nearest2d_backward": [(PLANES, [4, 4], [2, 3, 3, 6])],
    "upsample_nearest3d": [(BOXES, [3, 5, 2])],
    "upsample_nearest3d_backward": [(BOXES, [2, 2, 4], [1, 3, 3, 1, 5])],
    "value_selecting_reduction_backward": [(F32[0], 0, PLACES[0], [3, 4], False)],
    "view.dtype": [(F32, torch.int32), (F32, torch.int16)],
    "view_as_complex_copy": [(F32.reshape(3, 2, 2),)],
    "view_as_real_copy": [(COMPLEX,)],
    "xlogy.Scalar_Other": [(F32, 2.0)],
    "xlogy.Scalar_Self": [(2.0, F32.abs())],
}
