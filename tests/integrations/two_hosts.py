"""One of two processes that accelerate is to count; prints what it counts, as JSON.

`RANK=... python -m tests.integrations.two_hosts`. Their devices are not connected, so that nothing
can be trained: what would, says so (`spmdzero/backend/hosts/processes.py`).
"""

import json

import torch


def main() -> None:
    import spmdzero.integrations

    spmdzero.integrations.install()
    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import DataLoader

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    loader = accelerator.prepare_data_loader(DataLoader(range(16), batch_size=2))
    here = torch.tensor([accelerator.process_index])
    seen = {
        "rows": [row for batch in loader for row in batch.tolist()],
        "gathered": accelerator.gather(here).tolist(),
        "processes": accelerator.num_processes,
        "type": str(accelerator.distributed_type),
        "device": str(accelerator.device),
    }
    accelerator.wait_for_everyone()
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
