"""The script beside the checkpoints of a folder that writes their weights, as DeepSpeed leaves."""

import logging
import stat
from pathlib import Path

from spmdzero.formats._files import write_whole

_NAME = "zero_to_fp32.py"
_TEXT = '''\
#!/usr/bin/env python
"""Writes the fp32 weights of a checkpoint in this folder, where spmdzero is installed.

    python zero_to_fp32.py . OUTPUT_DIR [--safe_serialization] [--tag TAG]
"""

from spmdzero.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''
logger = logging.getLogger("spmdzero")


def write_script(folder: Path) -> None:
    """Writes ``zero_to_fp32.py``, in the place of DeepSpeed's; a failure is a warning.

    DeepSpeed's script reads only checkpoints of its own, this one reads both kinds.
    """
    path = folder / _NAME
    try:
        if not path.exists() or path.read_bytes() != _TEXT.encode():
            write_whole(path, _TEXT.encode())
            path.chmod(path.stat().st_mode | stat.S_IEXEC)
    except OSError as error:
        logger.warning(
            "%s can't be written, which is nothing but a shorter way to write `spmdzero convert "
            "%s TARGET --to fp32`: %s", path, folder, error
        )  # fmt: skip
