"""The tensor of ZeRO that a collective serves, read from names in and around it."""

import re
from collections.abc import Iterator, Sequence

from spmdzero._names import in_common
from spmdzero.hlo._module import Instruction, Module

# A scope named zero.gradient/layer.weight reaches HLO as zero.gradient/layer.weight.<number>/<op>.
_TAG = re.compile(r"(?:^|/)zero\.([a-z_]+)(?:/(.+?))?\.\d+(?=/|$)")
# Newer JAX names the collective of an output whose sharding is set for the whole program like this,
# which doesn't tell the output.
_OUTPUTS = re.compile(r"jit\(\w+\)/sharding_constraint")
# Operations that treat each element by itself, so that a slice after them could be before them.
ELEMENTWISE = {"add", "subtract", "multiply", "divide", "convert", "copy", "bitcast", "reshape"}
ELEMENTWISE |= {"transpose", "all-reduce-done", "async-done"}
# Opcodes that the compiler puts around a collective of its own to change a tensor's layout.
_LAYOUT = ELEMENTWISE | {"slice", "dynamic-slice", "dynamic-update-slice", "pad", "concatenate"}
_LAYOUT |= {"select", "copy-start", "copy-done", "collective-permute", "collective-permute-start"}
_LAYOUT |= {"collective-permute-done", "all-gather-done", "fusion", "get-tuple-element"}
_LAYOUT |= {"slice-start", "slice-done", "parameter", "tuple"}
# A loop stacks what each turn makes, from which others take their slices.
_LAYOUT |= {"while"}
# Over several slices libtpu reduces within each, and then moves parts between them.
_LAYOUT |= {"recv-done"}


def traced_as(module: Module, instruction: Instruction, element: int | None) -> Instruction:
    """The instruction whose metadata has the name under which one element was traced.

    A combined collective keeps the metadata of only one of its tensors, and a fused reduce-scatter
    none. The instruction that takes a tensor out of it keeps that tensor's own.
    """
    candidates = [*module.taken_out(instruction, element)]
    if element is None:
        candidates.insert(0, instruction)
    return next((found for found in candidates if _tag(found.op_name)[1]), instruction)


def tag_of(
    module: Module,
    instruction: Instruction,
    traced: Instruction,
    operand: Instruction,
    element: int | None,
    outputs: Sequence[str],
) -> tuple[str, str]:
    """The role and the tensor that one element of a collective serves, each "" if unknown.

    Without a tag of its own, they are read from the instructions around the element. For a
    collective that the compiler made for itself, without any name, also from the output behind it.

    Args:
        traced: the result of `traced_as`.
        outputs: the program's outputs in order, as ``role/tensor``.
    """
    own = _tag(instruction.op_name)
    if _OUTPUTS.fullmatch(traced.op_name):
        return _tag_by_use(module, instruction, element, outputs)
    if traced is not instruction:
        return _tag(traced.op_name)
    nameless = not instruction.op_name
    if element is None and not nameless:
        return own if own[0] else _parameter_by_output(module, instruction, outputs)
    before = (v.op_name for v in module.origin(operand, through=ELEMENTWISE | {"parameter"}))
    for name in (*before, *_names_after(module, instruction, element)):
        near = _tag(name)
        if near[1] and near[0] == (own[0] or near[0]):
            return near
    return _tag_by_use(module, instruction, element, outputs) if nameless else (own[0], "")


def gradient_by_use(
    module: Module, instruction: Instruction, element: int | None
) -> tuple[str, str] | None:
    """``gradient`` and its tensor if an update reads the element; None if none does.

    A reduce-scatter that the compiler takes apart, to make it asynchronous, loses its name. The
    norm reads it, too, of all gradients. It may be one of several, over a torus's directions.
    """
    through = _LAYOUT | {"all-reduce", "reduce-scatter", "all-gather", "custom-call"}
    tags = (
        _tag(use.user.op_name)
        for use in module.readers(instruction, element, through=through)
        if use.user
    )
    tensors = (tensor for role, tensor in tags if role == "update" and tensor)
    # What each turn of a loop reduces is of equal blocks.
    in_loop = module.in_loop(instruction.computation)
    tensor = in_common(set(tensors)) if in_loop else next(tensors, "")
    return ("gradient", tensor) if tensor else None


def _tag(op_name: str) -> tuple[str, str]:
    """Role and tensor of the innermost ``zero.<role>/<tensor>`` scope, ("", "") without one."""
    found = _TAG.findall(op_name)
    return found[-1] if found else ("", "")


def _tag_by_use(
    module: Module, instruction: Instruction, element: int | None, outputs: Sequence[str]
) -> tuple[str, str]:
    for use in module.readers(instruction, element, through=_LAYOUT):
        if use.user is None:
            role, _, tensor = outputs[use.position].partition("/") if outputs else ("", "", "")
            if role:
                return role, tensor
        elif _tag(use.user.op_name)[1]:
            return _tag(use.user.op_name)
    return "", ""


def _parameter_by_output(
    module: Module, instruction: Instruction, outputs: Sequence[str]
) -> tuple[str, str]:
    """The tag of a value that leaves as a new parameter, moved at most, possibly as a cast."""
    for use in module.readers(instruction, through=_LAYOUT) if outputs else ():
        if use.user is None and outputs[use.position].startswith("parameter/"):
            role, _, tensor = outputs[use.position].partition("/")
            return role, tensor
    return "", ""


def _names_after(module: Module, value: Instruction, element: int | None) -> Iterator[str]:
    for use in module.uses(value, element):
        if use.user is not None:
            yield use.user.op_name
            if use.user.opcode in ELEMENTWISE:
                yield from _names_after(module, use.user, None)
