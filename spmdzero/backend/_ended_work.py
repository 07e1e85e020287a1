"""A collective of torch's that has ended, for those that are answered at once."""

from typing import Any

import torch


def ended_work(result: Any = None) -> Any:
    """Makes the handle that a collective returns, which has ended with `result`."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future)
