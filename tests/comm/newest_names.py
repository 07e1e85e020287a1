"""Functions of torch.distributed by the names of torch 2.14, which deprecates those before."""

import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
functional_gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
