"""torch's dispatch modes, as the backends use them."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A mode whose calls don't import torch's compiler, which takes a second of each start.

    From torch 2.14 on it wraps each mode for its compiler, which is imported at the first call.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
