"""The mesh axes ``tensor`` and ``sequence``: their sizes, and the weights' dims that are split."""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from spmdzero._logging import log_once
from spmdzero.backend.hosts._row_sharers import RowSharers, share_rows
from spmdzero.config import (
    PRESETS,
    LayerSpec,
    SpmdZeroConfig,
    TensorParallelConfig,
    read,
    with_value,
)
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.formats import Split, TensorParallel
from spmdzero.plan import MeshSpec

# A style of transformers' plans (distributed/tensor_parallel.py) -> how it splits a weight. What it
# says of inputs and outputs, the compiler finds out. Of a "packed" weight, which is several in one,
# each device has a part of each after the compiler has moved what a slice misses.
_STYLES = {
    "colwise": "column",
    "colwise_rep": "column",
    "colwise_gather_output": "column",
    "packed_colwise": "column",
    "embedding_colwise": "column",
    "rowwise": "row",
    "rowwise_rep": "row",
    "rowwise_split_input": "row",
    "packed_rowwise": "row",
    "embedding_rowwise": "row",
}
# Styles that split no weight: ranks hold it whole, or communicate in the module that has it.
_WITHOUT_WEIGHT = (
    "all_reduce", "gather", "local_params", "mla_kv_a_proj", "moe_identity_expert",
    "moe_tp_experts", "replicate", "replicated_with_grad_allreduce", "sequence_parallel",
)  # fmt: skip
# Attributes of transformers' configs that count what attention splits a projection into.
_HEADS = ("num_attention_heads", "n_head", "num_heads", "num_key_value_heads")

# Names of weights whose results attention splits into heads.
_ATTENTION = re.compile(r"(q|k|v|q_b|kv_b)_proj|qkv|query|key|value|c_attn|\.[qkv]\.")

Way = str | int
# The attribute of a model with the size that `deepspeed.tp_model_init` was told.
_ADAPTED = ".base_layer."
_ASKED = "_spmdzero_autotp_size"
_Rule = Callable[[str], Way | None]


def tensor_dims(config: SpmdZeroConfig, model: nn.Module, *, mesh: MeshSpec) -> dict[str, int]:
    """Parameter name -> the dim that the axis ``tensor`` splits; empty without such an axis.

    "column" splits what a layer makes, "row" what it takes (Megatron-LM, arXiv 1909.08053): of an
    ``nn.Linear`` dim 0 or 1 of its weight, of an ``nn.Embedding`` dim 1 or 0, of transformers'
    ``Conv1D`` dim 1 or 0. A bias is split with the columns.

    Args:
        config: names the weights, as docs/config.md says: ``spmd.partition``, then
            ``tensor_parallel.partition_config`` and ``preset_model``, else the model's own plan.
        model: on any device.
        mesh: the devices.

    Raises:
        SpmdZeroConfigError: nobody says how to split the model; or a dim, or the number of heads,
            doesn't divide by the axis, or the heads by the axis ``sequence``.
    """
    if mesh.sequence > 1:
        _require_heads(model, mesh.sequence, mesh, keys=_HEADS[:-1])
    if mesh.tensor == 1:
        return {}
    rules, found = [*_rules(config, model)], dict[str, int]()
    for name, parameter, owners in _with_owners(model):
        # Of a tied weight, such as embedding and head, a rule may name either.
        ways = ((_way(rules, own), owner) for own, owner in owners.items())
        way, owner = next((each for each in ways if each[0] is not None), (None, model))
        dim = _dim(way, owner, parameter.dim())
        if dim is None:
            continue
        if not 0 <= dim < parameter.dim() or parameter.shape[dim] % mesh.tensor:
            raise _refuse(
                mesh,
                f"dim {dim} of {name} {list(parameter.shape)} doesn't divide by {mesh.tensor}",
                f'Choose a size that divides it, or write "spmd": {{"partition": '
                f'{{"{name}": "skip"}}}}.',
            )
        found[name] = dim
    if not found:
        raise _refuse(
            mesh,
            f"nothing says which weights of {type(model).__name__} it splits: the config names "
            "none of them, and the model has no _tp_plan of transformers",
            'Write "spmd": {"partition": {"*.fc1.weight": "column", "*.fc2.weight": "row"}} with '
            "the names of your model.",
        )
    if any(_ATTENTION.search(name) for name in found):
        _require_heads(model, mesh.tensor, mesh, keys=_HEADS)
    return found


def autotp_parts(config: SpmdZeroConfig, model: nn.Module, *, size: int) -> TensorParallel:
    """How DeepSpeed's AutoTP splits the weights by the same config, over `size` ranks.

    It is as `tensor_dims`, with three exceptions (module_inject/auto_tp.py). An embedding, and what
    is tied to it, is whole on each rank, unless a spec names it: then each has columns. A weight
    with a ``shape`` is split in each of those that it is made of.

    Raises:
        SpmdZeroConfigError: as of `tensor_dims`; or the weight isn't made of tensors along the dim.
        SpmdZeroUsageError: `size` is no number of ranks.
    """
    if size < 1:
        raise SpmdZeroUsageError(f"autotp_size={size}: use 1 or more")
    mesh = MeshSpec((("fsdp", 1), ("tensor", size)))
    dims, splits = tensor_dims(config, model, mesh=mesh), dict[str, Split]()
    specs, kind = [*_specs(config.tensor_parallel)], _model_type(model)
    for name, parameter, owners in _with_owners(model):
        # A bias is made of what its weight is made of.
        called = [*owners, *(f"{own.removesuffix('bias')}weight" for own in owners)]
        spec = next((s for s in specs if any(s.matches(own, kind) for own in called)), None)
        embeds = any(isinstance(owner, nn.Embedding) for owner in owners.values())
        if name not in dims or (embeds and spec is None):
            continue
        shape, dim = tuple(parameter.shape), 1 if embeds else dims[name]
        made_of = () if spec is None or embeds else _made_of(spec, name, shape, mesh)
        splits[name] = Split.even(shape, dim, ranks=size, of=made_of)
    return TensorParallel(size=size, splits=splits)


def _made_of(spec: LayerSpec, name: str, shape: tuple[int, ...], mesh: MeshSpec) -> tuple[int, ...]:
    """The lengths of the tensors that a weight is made of, along the dim that is split."""
    if spec.shape is None:
        return ()
    dim = 0 if spec.partition_type == "column" else 1
    place = dim if spec.partition_dim is None else spec.partition_dim
    made, length = spec.shape[min(place, len(spec.shape) - 1)], shape[min(dim, len(shape) - 1)]
    lengths = tuple(made) if isinstance(made, list) else (length // max(made, 1),) * max(made, 1)
    if len(spec.shape) != 2 or place != dim or sum(lengths) != length:
        raise _refuse(
            mesh,
            f"the shape {spec.shape} of tensor_parallel.partition_config, split along {place}, "
            f"isn't made of tensors along dim {dim} of {name} {list(shape)}",
            "Save the whole weights: save_deepspeed_checkpoint(..., autotp_size=1).",
        )
    for part in lengths:
        if part % mesh.tensor:
            raise _refuse(
                mesh,
                f"{name} is made of {list(lengths)}, which {mesh.tensor} ranks can't share equally",
                "Choose a size that divides them.",
            )
    return lengths


def _with_owners(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, dict[str, nn.Module]]]:
    """Yields each parameter with its first name, and the module of each of its names."""
    owners = dict[nn.Parameter, dict[str, nn.Module]]()
    for prefix, part in model.named_modules(remove_duplicate=False):
        for name, parameter in part.named_parameters(recurse=False):
            owners.setdefault(parameter, {})[f"{prefix}.{name}".lstrip(".")] = part
    for name, parameter in model.named_parameters():
        yield name, parameter, owners[parameter]


def _way(rules: Sequence[_Rule], name: str) -> Way | None:
    """How the first rule that names a parameter splits it; a bias goes with its columns."""
    way = next((way for rule in rules if (way := rule(name)) is not None), None)
    if way is None and _ADAPTED in name:
        # peft puts the layer that it adapts into one of its own.
        return _way(rules, name.replace(_ADAPTED, "."))
    if way is None and name.endswith("bias"):
        weight = _way(rules, name.removesuffix("bias") + "weight")
        return "column" if weight in ("column", 0) else None
    return way


def ask_for_size(model: nn.Module, size: int) -> None:
    """Has `with_asked_size` put `size` into the config of this model."""
    vars(model)[_ASKED] = size


def with_asked_size(config: Any, model: nn.Module) -> Any:
    """The config, with the ``autotp_size`` that `ask_for_size` was told, if it was.

    Raises:
        SpmdZeroConfigError: the config has a different one.
    """
    size = vars(model).get(_ASKED)
    if size is None:
        return config
    given = read(config)
    section = with_value(
        given.get("tensor_parallel") or {}, "autotp_size", size,
        at="tensor_parallel.", otherwise=f"tp_model_init(tp_size={size}) says otherwise",
    )  # fmt: skip
    return given | {"tensor_parallel": section}


def _dim(way: Way | None, owner: nn.Module, ndim: int) -> int | None:
    if way is None or way == "skip":
        return None
    if isinstance(way, int):
        return way
    if ndim == 1:
        return 0 if way == "column" else None
    transposed = isinstance(owner, nn.Embedding) or type(owner).__name__ == "Conv1D"
    first = (way == "column") != transposed
    if isinstance(owner, nn.modules.conv._ConvNd):
        return 0 if way == "column" else 1
    return ndim - 2 if first else ndim - 1


def _rules(config: SpmdZeroConfig, model: nn.Module) -> Iterator[_Rule]:
    own = config.spmd.partition
    if own:
        yield lambda name: next(
            (way for pattern, way in own.items() if fnmatch.fnmatchcase(name, pattern)), None
        )
    asked = config.tensor_parallel
    specs = [*_specs(asked)]
    if specs:
        if any(spec.shape for spec in specs):
            log_once(
                "tensor_parallel.partition_config: shape has no effect: a weight that is several "
                "in one is split in slices, and the compiler moves what a slice lacks"
            )
        kind = _model_type(model)
        yield lambda name: next((s.way for s in specs if s.matches(name, kind)), None)
        return
    # A module of Lightning's has the model of transformers inside.
    plans = (_transformers_plan(part) for part in model.modules())
    plan = next((plan for plan in plans if plan), None)
    if plan is not None:
        yield lambda name: _planned(plan, name)


def _config_of(model: nn.Module) -> Any:
    """The config of the outermost module that has one of transformers, else the model's own."""
    configs = [getattr(part, "config", None) for part in model.modules()]
    return next((config for config in configs if hasattr(config, "model_type")), configs[0])


def _model_type(model: nn.Module) -> str | None:
    return getattr(_config_of(model), "model_type", None)


def _specs(asked: TensorParallelConfig) -> Iterator[LayerSpec]:
    """The specs of the config; a spec of the user's comes before those of the preset.

    Source: DeepSpeed, runtime/tensor_parallel/config.py, `get_partition_config_object`.
    """
    custom = asked.partition_config
    if custom is not None:
        yield from custom.layer_specs
    if asked.preset_model and (custom is None or custom.use_default_specs):
        yield from PRESETS[asked.preset_model]


def _transformers_plan(model: nn.Module) -> dict[str, str]:
    """The plan of a model of transformers: pattern of names -> style.

    It is put together as by DeepSpeed's `_get_hf_tp_plan` (runtime/tensor_parallel/config.py).
    """
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    found = dict[str, str]()
    for plan in (base, getattr(type(model), "_tp_plan", None), vars(model).get("_tp_plan")):
        if isinstance(plan, Mapping):
            found |= plan
    return found


def _planned(plan: Mapping[str, str], name: str) -> Way | None:
    for pattern, style in plan.items():
        expression = ".*".join(map(re.escape, pattern.split("*")))
        if re.search(rf"(^|\.){expression}(\.weight)?$", name) is None:
            continue
        if style in _WITHOUT_WEIGHT:
            return "skip"
        if style not in _STYLES:
            raise SpmdZeroConfigError(
                key="spmd.mesh",
                value="tensor",
                reason=f"the model's own plan splits {name} as {style!r}, which is not known here",
                fix=f'Write "spmd": {{"partition": {{"{name}": "column"}}}}, or "row", or "skip".',
            )
        return _STYLES[style]
    return None


def _require_heads(model: nn.Module, parts: int, mesh: MeshSpec, *, keys: Sequence[str]) -> None:
    config = _config_of(model)
    for key in keys:
        count = getattr(config, key, None)
        if isinstance(count, int) and count % parts:
            raise _refuse(
                mesh,
                f"{type(model).__name__} has {key} = {count}, which {parts} devices can't share",
                f"Choose a size that divides {count}.",
            )


def _refuse(mesh: MeshSpec, reason: str, fix: str) -> SpmdZeroConfigError:
    return SpmdZeroConfigError(key="spmd.mesh", value=dict(mesh.axes), reason=reason, fix=fix)


def with_mpus_size(config: Any, mpu: Any) -> Any:
    """The config, with the ``sequence_parallel_size`` of `mpu`, if there is one.

    Args:
        config: as `read` takes it.
        mpu: what `UlyssesSPAttentionHF.register_with_transformers` has returned, or the module
            `deepspeed.runtime.sequence_parallel.parallel_state_sp`.

    Raises:
        SpmdZeroConfigError: the config has a different one.
        SpmdZeroUsageError: it is another `mpu`.
    """
    if mpu is None:
        return config
    group = getattr(mpu, "get_sequence_parallel_group", lambda: None)()
    if not isinstance(group, RowSharers):
        raise SpmdZeroUsageError(
            f"initialize(mpu={getattr(mpu, '__name__', type(mpu).__name__)}): it has groups of "
            "processes, and one process drives all devices. Give it what "
            "UlyssesSPAttentionHF.register_with_transformers returns, or leave it out: "
            '"sequence_parallel_size" lets devices share rows, "tensor_parallel": '
            '{"autotp_size": 2} weights'
        )
    size = group.size()
    otherwise = f"the mpu says {size}"
    return with_value(read(config), "sequence_parallel_size", size, otherwise=otherwise)


def with_mesh_param(config: Any, mesh_param: Any) -> Any:
    """The config, with the sizes of the mesh that DeepSpeed would make of `mesh_param`.

    Args:
        config: as `read` takes it.
        mesh_param: number of replicas, and of devices that share the rows of each; None for none.

    Raises:
        SpmdZeroConfigError: the config has different ones.
        SpmdZeroUsageError: it isn't two numbers.

    Source: DeepSpeed, ``deepspeed.initialize``.
    """
    if not mesh_param:
        return config
    sizes = tuple(mesh_param) if isinstance(mesh_param, list | tuple) else ()
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise SpmdZeroUsageError(
            f"initialize(mesh_param={mesh_param!r}): it is (data_parallel, sequence_parallel), the "
            "number of replicas and of devices that share the rows of each, such as (2, 4) for 8 "
            'devices. "tensor_parallel": {"autotp_size": 2} splits weights'
        )
    given = read(config)
    for key, size in zip(("data_parallel_size", "sequence_parallel_size"), sizes, strict=True):
        given = with_value(given, key, size, otherwise=f"mesh_param={mesh_param} says {size}")
    return given


def share_asked(mesh_param: Any, mesh: MeshSpec) -> None:
    """Makes the group of the devices that share rows, if `mesh_param` has asked for it.

    Scripts ask deepspeed.utils.groups for it afterwards.
    """
    if mesh_param and mesh.sequence > 1:
        share_rows(mesh.sequence)
