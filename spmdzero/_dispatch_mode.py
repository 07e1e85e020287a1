"""torch's dispatch modes, as spmdzero uses them."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A mode whose calls don't import torch's compiler, which takes a second of each start.

    From torch 2.14 on each mode's first call would import it, so that it leaves the mode out.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
