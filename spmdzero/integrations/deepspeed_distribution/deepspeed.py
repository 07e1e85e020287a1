"""The name `deepspeed` where spmdzero-deepspeed is installed: it stands for spmdzero."""

import importlib
import sys

from spmdzero.integrations import install

# What is imported under the name from now on is the package that `install` makes.
del sys.modules[__name__]
install()
importlib.import_module(__name__)
