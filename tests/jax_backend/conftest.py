"""What several tests of JAX's backend share."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def without_clients() -> Iterator[None]:
    """transformers as it is where no client is installed, which an earlier test may have done.

    Under a client it makes a mask wherever it would read whether one is needed.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            asked = vars(module).get("is_tracing") if name.startswith("transformers") else None
            if hasattr(asked, "__wrapped__"):
                patch.setattr(module, "is_tracing", asked.__wrapped__)
        yield
