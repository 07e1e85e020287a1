"""Integrations with the frameworks that scripts use: `deepspeed`, transformers, Lightning, ..."""

from spmdzero.integrations._client_engine import ClientEngine
from spmdzero.integrations._deferred import DeferredTensor
from spmdzero.integrations._initialize import initialize
from spmdzero.integrations._install import follow_clients, install, take_the_name

__all__ = [
    "ClientEngine",
    "DeferredTensor",
    "follow_clients",
    "initialize",
    "install",
    "take_the_name",
]
