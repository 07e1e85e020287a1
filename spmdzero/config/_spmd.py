"""The section ``spmd``."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from spmdzero.config._errors import RefusedValueError
from spmdzero.config._products import ProductsConfig
from spmdzero.config._tensor_parallel import PartitionType
from spmdzero.config._types import Count, Natural, Section, canonical_dtype

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def bytes_of(written: object) -> int | None:
    """The number of bytes of ``12000000000``, ``"12GB"`` or ``"11.5 GiB"``; None for others.

    kB, MB, GB and TB are powers of 1,000, KiB to TiB powers of 1,024.
    """
    if isinstance(written, bool):
        return None
    if isinstance(written, int):
        return written if written > 0 else None
    found = _WRITTEN.fullmatch(written) if isinstance(written, str) else None
    if found is None or found[2].replace("k", "K") not in _UNITS:
        return None
    return int(float(found[1]) * _UNITS[found[2].replace("k", "K")]) or None


BackendName = Literal["auto", "torch_xla", "jax"]
RecomputePolicy = Literal["nothing", "dots", "everything", "offload"]
OutputRule = Literal["batch", "mean", "sum", "agree", "stack"]

_AXES = ("data", "fsdp", "sequence", "tensor")
# Key -> the values that a global forward allows, and the reason for refusing other values.
_NEEDS_THE_REGION: dict[str, tuple[tuple[object, ...], str]] = {
    "reduction": (("annotated", "auto"), "explicit reduction happens in the replica region"),
    "attention": (("plain", "auto"), "kernels run in the replica region"),
    "scan": (("off", "auto"), "equal blocks become a loop in the replica region"),
    "fused_loss": ((False,), "chunks are rows of one device in the replica region"),
    "recompute": (("nothing",), "blocks run again in the replica region"),
    "products": ((None,), "each replica multiplies its own rows in 8 bits, in the replica region"),
}


class SpmdConfig(Section):
    """spmdzero's own settings, for which DeepSpeed has no keys.

    Attributes:
        backend: the backend that traces and compiles: "torch_xla", "jax", or the value of the
            environment variable SPMDZERO_BACKEND, else torch_xla if the process has imported it,
            else JAX if it is installed and torch_xla if not ("auto"). A process has one backend.
        mesh: number of devices on each mesh axis, "data" before "fsdp" before "sequence" before
            "tensor"; -1 takes the remaining devices.
        partition: how the axis "tensor" splits weights, by patterns of parameters' names in which
            * is anything: "column" splits what a layer makes, "row" what it takes, a number is the
            weight's dim, "skip" splits nothing. The first pattern that matches counts; a name that
            none matches is split as `tensor_parallel` or the model's own plan says.
        forward: "region" runs the module on each replica's rows, "global" on the global batch.
        reduction: how a gradient is reduced: by the compiler ("annotated"), by a call in the
            replica region ("explicit"), or by the one of both that keeps a reduce-scatter ("auto").
        batch_dim: the tensor dim of the batch, for all inputs or by an input's name.
        outputs: how an output leaves the region, by its dotted path such as "attentions.0".
        attention: how `scaled_dot_product_attention` is computed in the region: by a kernel
            ("kernel", which is interpreted slowly on the CPU), by plain products ("plain"), or by a
            kernel in programs for TPUs and GPUs ("auto"). Kernels are the JAX backend's.
        fused_loss: whether transformers' causal language models train without logits: their loss
            comes from hidden states, chunk by chunk, and their output has no logits.
        recompute: which values of equal blocks that follow each other in a ModuleList or Sequential
            backward computes again instead of keeping them: "nothing"; "everything", which keeps a
            block's inputs; "offload", which keeps them in the host's memory, on the JAX backend;
            "dots", which keeps also the results of matrix products, convolutions and attention
            kernels. {"keep": ["q_proj", "context"], "offload": ["input"]} keeps what these modules
            of a block return, attention's output ("context") and a block's inputs, on the devices
            or in the host's memory, and all else is computed again. Or an object of these by module
            name, in which * is anything but a dot. "fit" takes what computes least of the words,
            and of what keeps attention's output and linear layers', with which the compiled step
            fits the device's memory, {"fit": "12GB"} this budget of bytes of a device; on the JAX
            backend.
        products: {"dtype": "fp8"} or "int8" has linear layers multiply in 8 bits; see its keys.
        moments: the dtype in which an optimizer's state rests, by its name such as "exp_avg":
            "float32" or "bfloat16"; updates are computed in fp32. A name that is missing rests in
            fp32, or as ``bf16_optimizer_states`` says. bf16 keeps 8 bits, and a change by less than
            1/512 of a value is lost: with betas of 0.9 and 0.999 it suits "exp_avg" alone.
        min_shard_elements: tensors with fewer elements are replicated.
        xla_flags: the TPU compiler flags with a measured effect on a generation's collectives:
            those of the present or explained chip ("auto"), of a named generation, or none.
        compile_cache: a folder for compiled programs, which later processes read; "" keeps none. It
            has no effect on torch_xla's CPU, whose programs can't be read back.
        check_finite: whether a non-finite loss or gradient raises before the update; under a
            dynamic loss scale, whose overflows are expected, only a loss.
        capture: whether a step starts its compiled program without running the model's Python, once
            it has seen that its traces stay the same (JAX).
        scan: whether four or more equal blocks of a ModuleList or Sequential are compiled once, as
            a loop: "auto" does so in programs for TPUs, "on" on any device; on the JAX backend.
        lengths: to which lengths clients' batches of texts are padded, so that few programs are
            compiled: "auto" takes powers of two and halves between them, from 64 on, once batches
            have had two lengths; a list names them; "off" leaves rows as they are. A script of its
            own wraps its loader in `spmdzero.data.PadToLengths`.
        broadcast: whether all hosts take the first host's parameters and buffers; if not, hosts
            with different values are refused.
        timeout: seconds in which each host must give a sign of life; without it the others end.
    """

    backend: BackendName = "auto"
    mesh: dict[str, int] = Field(default_factory=lambda: {"fsdp": -1})
    partition: dict[str, PartitionType | Natural] = Field(default_factory=dict)
    forward: Literal["region", "global"] = "region"
    reduction: Literal["annotated", "explicit", "auto"] = "auto"
    batch_dim: int | dict[str, int] = 0
    outputs: dict[str, OutputRule] = Field(default_factory=dict)
    attention: Literal["auto", "kernel", "plain"] = "auto"
    fused_loss: bool = False
    recompute: RecomputePolicy | Literal["fit"] | dict[str, Any] = "nothing"
    products: ProductsConfig | None = None
    moments: dict[str, Literal["fp32", "bf16"]] = Field(default_factory=dict)
    min_shard_elements: Natural = 2048
    xla_flags: Literal["auto", "none", "v5e", "v5p", "v6e", "tpu7x"] = "none"
    compile_cache: str = ""
    check_finite: bool = False
    capture: bool = True
    scan: Literal["auto", "on", "off"] = "off"
    lengths: Literal["auto", "off"] | list[Count] = "auto"
    broadcast: bool = False
    timeout: Annotated[float, Field(gt=0)] = 60.0

    @field_validator("mesh")
    @classmethod
    def _axes(cls, mesh: dict[str, int]) -> dict[str, int]:
        example = (
            'Write {"fsdp": -1}, {"data": 2, "fsdp": -1} for two replicas of the shards, '
            '{"fsdp": -1, "sequence": 2} for rows that two devices share, or '
            '{"fsdp": -1, "tensor": 2} for weights.'
        )
        if not {"fsdp"} <= mesh.keys() <= set(_AXES):
            raise RefusedValueError(
                "the mesh axes are 'fsdp' and, if wanted, 'data', 'sequence' and 'tensor'",
                fix=example,
            )
        if list(mesh.values()).count(-1) > 1:
            raise RefusedValueError("only one axis can take the devices that are left", fix=example)
        if any(size < 1 and size != -1 for size in mesh.values()):
            raise RefusedValueError(
                "an axis has 1 device or more, or -1 for what is left", fix=example
            )
        return {axis: mesh[axis] for axis in _AXES if axis in mesh}

    @field_validator("moments", mode="before")
    @classmethod
    def _fp32_or_bf16(cls, moments: object) -> object:
        if not isinstance(moments, dict):
            return moments
        found = {slot: canonical_dtype(dtype) for slot, dtype in moments.items()}
        for slot, dtype in found.items():
            if dtype not in ("fp32", "bf16"):
                raise RefusedValueError(
                    "in fp16 the square of a gradient below 1e-4 is 0"
                    if dtype == "fp16"
                    else "an optimizer's state rests in fp32 or bf16",
                    fix='Write "bfloat16" or "float32".',
                    at=(str(slot),),
                )
        return found

    # With mode="plain", as a union would put the name of its branch into the error's key.
    @field_validator("batch_dim", mode="plain")
    @classmethod
    def _dims(cls, batch_dim: object) -> object:
        dims = list(batch_dim.values()) if isinstance(batch_dim, dict) else [batch_dim]
        if any(isinstance(dim, bool) or not isinstance(dim, int) or dim < 0 for dim in dims):
            raise RefusedValueError(
                "this is not a tensor dim from 0, nor an object of them by input name",
                fix='Write 0, or for example {"input_ids": 0, "hidden": 1}.',
            )
        return batch_dim

    # With mode="plain" for the same reason.
    @field_validator("recompute", mode="plain")
    @classmethod
    def _policies(cls, recompute: object) -> object:
        if recompute == "fit":
            return recompute
        if isinstance(recompute, dict) and _names_a_budget(recompute):
            return _checked_budget(recompute)
        named = not isinstance(recompute, dict) or _names_values(recompute)
        for policy in [recompute] if named else recompute.values():  # type: ignore[missing-attribute]
            _check_policy(policy)
        return recompute

    @property
    def fits_recompute(self) -> bool:
        """Whether the policy of `recompute` is to be found by the compiled step's memory."""
        return self.recompute == "fit" or _names_a_budget(self.recompute)

    @property
    def recompute_budget(self) -> int | None:
        """Bytes of a device that the step may take; None for the device's memory."""
        given = self.recompute
        return (
            bytes_of(given["fit"]) if isinstance(given, dict) and _names_a_budget(given) else None
        )

    @model_validator(mode="after")
    def _what_needs_the_region_has_it(self) -> "SpmdConfig":
        for key, (without, reason) in _NEEDS_THE_REGION.items():
            value = getattr(self, key)
            if self.forward == "global" and value not in without:
                raise RefusedValueError(
                    f"{reason}, which a global forward lacks",
                    fix='Leave it out, or write "forward": "region".',
                    at=(key,),
                )
        if self.forward == "global" and self.outputs:
            raise RefusedValueError(
                "outputs leave no replica region when the forward is global",
                fix='Leave it out, or write "forward": "region".',
                at=("outputs",),
            )
        return self


def _names_a_budget(recompute: object) -> bool:
    # A policy under this name is that of a module called "fit".
    return (
        isinstance(recompute, dict)
        and "fit" in recompute
        and recompute["fit"] not in get_args(RecomputePolicy)
    )


def _names_values(recompute: dict[str, Any]) -> bool:
    # Other objects have a policy by each module name.
    return any(isinstance(names, list) for names in recompute.values())


def _check_policy(policy: object) -> None:
    if isinstance(policy, str) and policy in get_args(RecomputePolicy):
        return
    example = '{"keep": ["q_proj", "context"], "offload": ["input"]}'
    if not isinstance(policy, dict) or not policy.keys() <= {"keep", "offload"}:
        raise RefusedValueError(
            f"what is computed again is one of {', '.join(get_args(RecomputePolicy))}, or all but "
            'what an object names under "keep" and "offload"',
            fix=f'Write "dots", {{"transformer.h.*": "everything"}}, {example}, or "fit".',
        )
    names = [name for some in policy.values() for name in (some if isinstance(some, list) else [0])]
    if not all(isinstance(name, str) and name for name in names):
        raise RefusedValueError(
            "what is kept of a block, or offloaded, is a list of names of its modules, of "
            '"input" and "context"',
            fix=f"Write {example}.",
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RefusedValueError(f"{twice!r} is named twice", fix="Name it once.")


def _checked_budget(recompute: dict[str, Any]) -> dict[str, Any]:
    example = 'Write {"fit": "12GB"}, {"fit": "11.5GiB"} or "fit", the device\'s memory.'
    if len(recompute) > 1:
        raise RefusedValueError("a budget of bytes stands alone", fix=example)
    if bytes_of(recompute["fit"]) is None:
        raise RefusedValueError("the budget is no number of bytes", fix=example)
    return recompute


def backend_of(config: Mapping[str, Any]) -> BackendName:
    """The backend in an unchecked config; a wrong name counts as "auto" until the check."""
    section = config.get("spmd")
    name = section.get("backend", "auto") if isinstance(section, Mapping) else "auto"
    return name if name in get_args(BackendName) else "auto"


def mesh_axes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """`SpmdZeroConfig.mesh_axes` of an unchecked config; wrong types count as none until the check.

    An axis that the config writes twice has the size of ``spmd.mesh``.
    """
    written, axes = _value(config, "spmd", "mesh"), {"fsdp": -1}
    if isinstance(written, Mapping) and all(isinstance(size, int) for size in written.values()):
        axes = dict(written)
    named = {
        "sequence": config.get("sequence_parallel_size"),
        "tensor": _value(config, "tensor_parallel", "autotp_size"),
    }
    sizes = {axis: n for axis, n in named.items() if isinstance(n, int) and n > 1} | axes
    replicas = config.get("data_parallel_size")
    return with_replicas(sizes, replicas if isinstance(replicas, int) else 0)


def with_replicas(axes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """The axes, of which ``fsdp`` has the size that makes so many replicas, if it is open.

    Args:
        axes: name of an axis -> its size.
        replicas: ``data_parallel_size``; 0 for none.
    """
    data = axes.get("data", 1)
    if replicas > 0 and axes.get("fsdp") == -1 and data > 0 and replicas % data == 0:
        return {**axes, "fsdp": replicas // data}
    return dict(axes)


def _value(config: Mapping[str, Any], section: str, key: str) -> Any:
    inner = config.get(section)
    return inner.get(key) if isinstance(inner, Mapping) else None
