"""The package `deepspeed` of the distribution spmdzero-deepspeed: it is spmdzero."""

import sys

from spmdzero.integrations import take_the_name

take_the_name(sys.modules[__name__])
