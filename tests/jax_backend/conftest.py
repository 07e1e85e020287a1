"""Says of these files that they run with JAX alone."""

import pytest

pytestmark = pytest.mark.backends("jax")
