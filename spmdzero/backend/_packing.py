"""Modules whose rows may hold several texts each."""

import weakref

from torch import nn

packing: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Clients' modules, which are given rows of several texts, others on each device."""
