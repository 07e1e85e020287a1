"""`data_ptr()` of tensors and storages on the devices, which torch_xla has not, or has as 0.

Code that writes files asks with it which tensors share memory (safetensors, and so transformers,
peft, accelerate and huggingface_hub). Here those share memory that share torch's object of a
storage, as a tensor, its views and its detached copies do.
"""

import functools
from collections.abc import Callable

import torch

from spmdzero._replaced import in_place_of

_BECAUSE = "savers ask which tensors share memory, and torch_xla has no address, or 0 for each"


@functools.cache
def tell_storages_apart() -> None:
    """Makes torch answer with a number for each storage on the devices; once per process."""

    @in_place_of(torch.UntypedStorage, "data_ptr", because=_BECAUSE)
    def of_storage(own: Callable[..., int], self: torch.UntypedStorage) -> int:
        return self._cdata if self.device.type == "xla" else own(self)

    @in_place_of(torch.Tensor, "data_ptr", because=_BECAUSE)
    def of_tensor(own: Callable[..., int], self: torch.Tensor) -> int:
        if self.device.type != "xla":
            return own(self)
        offset = int(self.storage_offset()) * self.element_size()
        return self.untyped_storage().data_ptr() + offset
