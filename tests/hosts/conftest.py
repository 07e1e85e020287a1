"""Says of these files that their own processes have the backend."""

import pytest

pytestmark = pytest.mark.backends("any")
