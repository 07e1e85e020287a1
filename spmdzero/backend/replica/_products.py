"""The operations that multiply matrices."""

import torch

_aten = torch.ops.aten
PRODUCTS = {
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.mv.default,
    _aten.dot.default,
    _aten.linear.default,
    _aten.convolution.default,
    _aten.convolution_overrideable.default,
}
