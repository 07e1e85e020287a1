"""Writes docs/api_surface.md: which of DeepSpeed's names are here, and which are refused.

`python -m tests.surface.render`
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

from spmdzero.compat.refusals import ATTRIBUTES, REFUSALS, Refusal
from tests.surface.surface import OTHER_PARAMETERS, RECORDED, status

PAGE = Path(__file__).parents[2] / "docs" / "api_surface.md"
OPENING = """\
# DeepSpeed's names

Check which names of DeepSpeed 0.19.8 work under `import spmdzero as deepspeed`, and what to use in
place of those that don't.

A name that is here has DeepSpeed's parameters, in its order and with its defaults. A name that is
refused can be imported and asked about (`isinstance` works); calling it raises
`SpmdZeroUsageError` with the reason and the alternative below, and so does `import` of a module
that is refused. `python -m tests.surface.render` writes this page from the code and from
DeepSpeed's recorded signatures.

What differs although the name is the same:

- One process drives all devices of its host. `comm.get_rank()` and `comm.get_world_size()` count
  processes, `get_accelerator().device_count()` counts this host's devices.
- `comm`'s collectives move host data, by gloo. A device tensor goes through the host and back.
- `param.grad` is gathered when it is read, between `backward` and `step`. Write into it, or assign
  to it, and the step uses what you wrote.
- `utils.safe_set_full_fp32_param` changes the parameter at once; DeepSpeed's forward sees the new
  weights after the next step.
- `utils.safe_get_full_optimizer_state` works for every param group; DeepSpeed's for the first only.
- An error is of DeepSpeed's type too: what it refuses by an `assert` is an `AssertionError` here
  and a `SpmdZeroError`, and so with `ValueError`, `TypeError` and `NotImplementedError`.
- `zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, ...)` moves the module off the
  devices, as in DeepSpeed: its engine refuses to go on, and says so.
- `utils.safe_get_local_*` and `safe_set_local_*` are refused: a process has several devices, each
  with a part. Set a tensor as a whole, and `spmdzero.local_shards(parameter)`, or of
  `engine.named_tensors()["exp_avg/..."]`, is what each device holds of it.
- `engine.save_16bit_model` and `engine._zero3_consolidated_16bit_state_dict()` give whole weights
  at stage 3 whatever `stage3_gather_16bit_weights_on_model_save` says. DeepSpeed saves nothing
  where it is false.
- `checkpointing.checkpoint` recomputes in the compiled program, and in an engine's module so does
  `torch.utils.checkpoint`. Elsewhere XLA merges torch's second forward with the first.
- A parameter has its whole shape at every stage, in `zero.Init` too, which at stage 3 moves it to
  the devices while the model is built; what computes with it there gets it on the host.
  `zero.GatheredParameters` gathers nothing of an engine's: what was written with a `modifier_rank`
  becomes the masters. An engine's parameter has `ds_id`, `ds_numel`, `ds_shape`, `ds_status`,
  which is always AVAILABLE, and `partition_numel()` at stage 3, but no `ds_tensor`;
  `is_zero_param` says whether it rests as shards.
"""
OF_INSTANCES = """\
What scripts ask of an engine and its optimizer besides:

- `optimizer.loss_scaler` has `loss_scale` and `cur_scale`, 1.0 without fp16, which can't be set
  `optimizer.override_loss_scale(x)` is fp16's; `optimizer.needs_scaler()` is DeepSpeed's.
- `optimizer.refresh_fp32_params()` makes masters of parameters that were written into.
  `optimizer.set_lr(x)` sets all groups', `optimizer.get_lr()` returns the first one's.
- `optimizer.optimizer` and `engine.basic_optimizer` are the optimizer itself: it wraps no other.
- `engine._config` has DeepSpeed's names: `engine._config.zero_config.stage`.
- `engine.tput_timer.update_epoch_count()` counts; `start()` and `stop()` time nothing, and say so.
- `engine.flops_profiler` is there when the config turns it on.
- `engine.data_parallel_group` is the group of all processes.
"""


def rendered() -> str:
    """The page."""
    here: dict[str, list[str]] = {}
    for name in RECORDED:
        if status(name) == "here":
            package, _, last = name.rpartition(".")
            here.setdefault(package, []).append(last)
    lines = [OPENING, "## Here\n"]
    for package, names in sorted(here.items()):
        lines.append(f"**{package}**: {', '.join(f'`{name}`' for name in names)}\n")
    lines.append("With parameters of their own:\n")
    lines += [f"- `{name}`: {why}" for name, why in OTHER_PARAMETERS.items()]
    lines += ["", OF_INSTANCES, "## Refused\n", *_refused(REFUSALS)]
    lines += ["Attributes of the engine and of its optimizer, of which `hasattr` says no:\n"]
    return "\n".join([*lines, *_refused(ATTRIBUTES)])


def _refused(table: dict[str, Refusal]) -> Iterator[str]:
    by_reason = sorted(table.items(), key=lambda item: (item[1].reason, item[0]))
    for refusal, group in itertools.groupby(by_reason, key=lambda item: item[1]):
        names = ", ".join(f"`{path}`" for path, _ in group)
        yield f"{names}: {refusal.reason}. {refusal.instead}.\n"


if __name__ == "__main__":
    PAGE.write_text(rendered())
