"""The name `deepspeed` where spmdzero-deepspeed is installed: it stands for spmdzero."""

import sys

from spmdzero.integrations import take_the_name

take_the_name(sys.modules[__name__])
