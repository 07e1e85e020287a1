"""A host comes to spmdzero long after the other, with which it has a group of its own making."""

import datetime
import json
import sys
import time

import torch.distributed as dist

import spmdzero


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    if dist.get_rank() == 0:
        time.sleep(float(sys.argv[1]))
    spmdzero.init_distributed()
    print(json.dumps(spmdzero.comm.get_world_size()))


if __name__ == "__main__":
    main()
