"""Records what real DeepSpeed's flops profiler counts into tests/data/flops_profile.json.

Needs deepspeed==0.19.8: `DS_ACCELERATOR=cpu python -m tests.surface.record_flops`. One forward of
one row of the contract's model: multiply-accumulates of each module, its submodules included.
"""

import json
from pathlib import Path

from tests.support.contract import make_batch, make_model

DATA = Path(__file__).parents[1] / "data" / "flops_profile.json"


def main() -> None:
    """Profiles and records."""
    from deepspeed.profiling.flops_profiler import FlopsProfiler
    from deepspeed.profiling.flops_profiler.profiler import get_module_macs

    model = make_model()
    x, y = make_batch(0, 0)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(x[:1], y[:1])
    recorded = {
        "macs": {name: get_module_macs(module) for name, module in model.named_modules()},
        "params": profiler.get_total_params(),
    }
    profiler.end_profile()
    DATA.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
