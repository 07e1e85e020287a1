"""`data_ptr()` of tensors and storages on the devices, which torch_xla has not, or has as 0.

Code that writes files asks with it which tensors share memory (safetensors, and so transformers,
peft, accelerate and huggingface_hub). Here those share memory that share torch's object of a
storage, as a tensor, its views and its detached copies do.
"""

import functools

import torch


@functools.cache
def tell_storages_apart() -> None:
    """Makes torch answer with a number for each storage on the devices; once per process."""
    of_tensors, of_storages = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr

    @functools.wraps(of_storages)
    def of_storage(self: torch.UntypedStorage) -> int:
        return self._cdata if self.device.type == "xla" else of_storages(self)

    @functools.wraps(of_tensors)
    def of_tensor(self: torch.Tensor) -> int:
        if self.device.type != "xla":
            return of_tensors(self)
        offset = int(self.storage_offset()) * self.element_size()
        return self.untyped_storage().data_ptr() + offset

    torch.Tensor.data_ptr = of_tensor  # type: ignore[method-assign]
    torch.UntypedStorage.data_ptr = of_storage  # type: ignore[method-assign]
