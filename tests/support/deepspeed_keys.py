"""Writes each key that DeepSpeed reads of a config to tests/data/deepspeed_0_19_8_keys.json.

A key's value there is `{"default": ...}`, or `{}` where its default is no JSON value or unknown.
And to tests/data/deepspeed_unknown_keys.json, by section, whether it refuses or ignores a key that
it doesn't know.

Needs DeepSpeed 0.19.8 (``pip install '.[bench]'``) and ``DS_ACCELERATOR=cpu``. A recording dict
notes what DeepSpeed's own config class asks it for; a pydantic section adds its fields, by each
name that it accepts.
"""

import json
from pathlib import Path
from typing import ClassVar

import pydantic
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS as REMOVED
from deepspeed.runtime.config import _REMOVED_ZERO_CONFIG_KEYS as REMOVED_OF_ZERO
from deepspeed.runtime.config import DeepSpeedConfig, HybridEngineConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

DATA = Path(__file__).parents[1] / "data"
OUT = DATA / "deepspeed_0_19_8_keys.json"
UNKNOWN = DATA / "deepspeed_unknown_keys.json"

# DeepSpeed reads the section as keyword arguments of this model.
MODELS = {
    "bf16": DeepSpeedBF16Config,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "fp16": DeepSpeedFP16Config,
    "hybrid_engine": HybridEngineConfig,
    "tensor_parallel": TPTrainingConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "weight_quantization": WeightQuantConfig,
    "zero_optimization": DeepSpeedZeroConfig,
    **{name: field.annotation for name, field in DeepSpeedMonitorConfig.model_fields.items()},
}
# Read only when a feature is on; the recording run turns nothing on.
READ_ELSEWHERE = ["allgather_size", "data_parallel_size", "sequence_parallel_size"]
SECTIONS = [
    "activation_checkpointing",
    "aio",
    "autotuning",
    "checkpoint",
    "data_efficiency",
    "data_types",
    "expert_parallel",
    "flops_profiler",
    "optimizer",
    "scheduler",
    "torch_autocast",
]


class Recorder(dict):
    """A dict that notes the dotted path of each key it is asked for, and the default."""

    seen: ClassVar[dict[str, dict[str, object]]] = {}

    def __init__(self, content, at=""):
        super().__init__(content)
        self.at = at

    def note(self, key, **default):
        self.seen.setdefault(f"{self.at}.{key}".lstrip("."), {}).update(default)

    def get(self, key, default=None):
        # A default of None is often replaced afterwards; the objects are sections.
        known = default is not None and not isinstance(default, dict)
        self.note(key, **({"default": default} if known else {}))
        return super().get(key, default)

    def __getitem__(self, key):
        self.note(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.note(key)
        return super().__contains__(key)

    def keys(self):
        return self

    def __copy__(self):
        return self

    def copy(self):
        return self


def of_model(at, model):
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        plain = isinstance(default, bool | int | float | str | list | None)
        for spelling in {name, field.alias or name}:
            yield f"{at}.{spelling}", {"default": default} if plain else {}
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
                yield from of_model(f"{at}.{field.alias or name}", inner)


def unknown_in(section):
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    holder = config
    for part in filter(None, section.split(".")):
        holder = holder.setdefault(part, {})
    holder["no_such_key"] = 1
    try:
        DeepSpeedConfig(config)
    except pydantic.ValidationError:
        return "refused"
    return "ignored"


def main():
    sections = {name: Recorder({}, name) for name in SECTIONS}
    sections["checkpoint"]["parallel_write"] = Recorder({}, "checkpoint.parallel_write")
    sections["checkpoint"]["writer"] = Recorder({}, "checkpoint.writer")
    sections["torch_autocast"].update(dtype="bf16", lower_precision_safe_modules=[])
    for name in ("optimizer", "scheduler"):
        sections[name].update(type="Adam", params={})
    sections["expert_parallel"]["enabled"] = False
    DeepSpeedConfig(Recorder({"train_batch_size": 1, **sections}))
    keys = dict(Recorder.seen)
    for key in (*MODELS, *READ_ELSEWHERE, *REMOVED):
        keys.setdefault(key, {})
    keys |= {f"zero_optimization.{name}": {} for name in REMOVED_OF_ZERO}
    for at, model in MODELS.items():
        keys.update(of_model(at, model))
    lines = (f"{json.dumps(key)}: {json.dumps(keys[key])}" for key in sorted(keys))
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    nested = ["checkpoint.parallel_write", "timers", "zero_optimization.offload_optimizer"]
    nested.append("zero_optimization.offload_param")
    of_section = {at: unknown_in(at) for at in sorted(["", *MODELS, *SECTIONS, *nested])}
    UNKNOWN.write_text(json.dumps(of_section, indent=1) + "\n")


if __name__ == "__main__":
    main()
