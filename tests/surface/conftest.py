"""Says which backends these files run on."""

import pytest

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")
