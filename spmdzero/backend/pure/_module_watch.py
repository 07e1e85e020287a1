"""Notices that a module has changed since its step was traced."""

import argparse
import collections
import enum
import functools
import itertools
import operator
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from spmdzero.backend._current import arrays

# Tensors with more elements are data, which is not copied: such a tensor is watched by its version
# only, such a numpy array not at all.
_MOST_ELEMENTS = 1 << 16


class WatchedContent:
    """The content of an object, now and when the watch was made.

    Args:
        name: the object's name in messages.
        stamp: reads a value that changes with the content, to be compared.
        restore: puts the content back.
    """

    def __init__(
        self, name: str, stamp: Callable[[], object], restore: Callable[[], object]
    ) -> None:
        self._name, self._stamp, self._restore = name, stamp, restore
        self._seen = stamp()

    def change(self) -> str | None:
        """The change in words, or None."""
        return None if self._stamp() == self._seen else f"{self._name} was written"

    def restore(self) -> None:
        """Undoes the change."""
        self._restore()
        self._seen = self._stamp()


def content_of(name: str, value: Any) -> WatchedContent | None:
    """Watches `value` if it is a tensor, a numpy array or a generator of random numbers."""
    if isinstance(value, torch.Tensor):
        # A tensor made in inference mode has no version, and can't be written outside of it.
        if value.is_inference():
            return None
        if arrays.is_mine(value):
            # A clone costs nothing as long as neither tensor is written.
            before = value.detach().clone()
            return WatchedContent(
                name,
                lambda: arrays.write_stamp(value),
                lambda: arrays.set_value(value, before),
            )
        if value.device.type != "cpu":
            return None
        kept = value.detach().clone() if value.numel() <= _MOST_ELEMENTS else None
        return WatchedContent(
            name,
            # The version doesn't show a write through `.data`, or into memory shared with numpy.
            lambda: value._version,
            lambda: None if kept is None else value.detach().copy_(kept),
        )
    if isinstance(value, np.ndarray):
        if value.size > _MOST_ELEMENTS:
            return None
        before = value.copy()
        return WatchedContent(name, value.tobytes, lambda: np.copyto(value, before))
    for kind, get, put in _GENERATORS:
        if isinstance(value, kind):
            return _generator(name, value, get, put)
    return None


def _generator(
    name: str, value: Any, get: Callable[[Any], Any], put: Callable[[Any, Any], None]
) -> WatchedContent:
    state = get(value)
    return WatchedContent(name, lambda: pickle.dumps(get(value)), lambda: put(value, state))


def _set_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_GENERATORS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], None]], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
    (np.random.Generator, operator.attrgetter("bit_generator.state"), _set_bits),
    (
        torch.Generator,
        lambda generator: generator.get_state().numpy(),
        lambda generator, state: generator.set_state(torch.from_numpy(state)),
    ),
)


HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_LIBRARIES = {*sys.stdlib_module_names, "jax", "numpy", "torch", "torch_xla", "spmdzero"}
# The package of the class that model cards have in common.
_CARDS = "huggingface_hub"
_REGISTRIES = {"_parameters", "_modules", *HOOKS}
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
# Those that are equal to others; what goes through a set depends on how it was filled.
_PLAIN_CONTAINERS = (dict, list, tuple)
# A container with more items is data, and code doesn't branch on it item by item.
_MOST_ITEMS = 1024
_DEPTH = 3
# Called for each submodule at each step; a Python function would cost four times as much.
_VALUES_OF = operator.methodcaller("values")
# Fills in for a missing value, and is equal to no value.
_NOTHING = object()


class _Watched:
    """A container and what was in it.

    Args:
        name: the container's name in messages.
        hooks: whether it is a registry of hooks, whose keys are numbers that nothing reads.

    Attributes:
        has_new: whether an equal container has taken the place of one of the values.
    """

    def __init__(self, name: str, container: Any, *, hooks: bool) -> None:
        self.container, self.has_new = container, False
        self._name, self._hooks = name, hooks
        self._note()

    def _note(self) -> None:
        container = self.container
        mapping = isinstance(container, dict)
        self._kept = list(container.items()) if mapping else list(container)
        self._keys = list(container) if mapping and not self._hooks else []
        self._values = self._now()

    def _now(self) -> list[Any]:
        values = list(_values(self.container))
        return _effective(values) if self._hooks else values

    def restore(self) -> None:
        """Puts the earlier items back; a tuple can't have changed."""
        if isinstance(self.container, tuple):
            return
        self.container.clear()
        if isinstance(self.container, dict | set):
            self.container.update(self._kept)
        else:
            self.container.extend(self._kept)

    def change(self) -> str | None:
        """The change in words, or None; plain values are compared by ``==`` here."""
        now = self._now()
        mapping = isinstance(self.container, dict) and not self._hooks
        keys = list(self.container) if mapping else range(len(now))
        if len(now) != len(self._values):
            return f"{self._name} has {len(now)} entries, not {len(self._values)}"
        if self._keys and not all(map(_is_same_key, keys, self._keys)):
            return f"{self._name} has other keys"
        # Equal hooks have other numbers, by which their handles remove them.
        same = not self._hooks or [*self.container] == [number for number, _ in self._kept]
        for key, old, new in zip(keys, self._values, now, strict=True):
            if old is new:
                continue
            if not _is_same_value(old, new, _DEPTH):
                if key == "training":
                    return f"{self._name} is now in {'train' if new else 'eval'} mode"
                return f"{key!r} of {self._name}: {_shown(old)} -> {_shown(new)}"
            same = False
            self.has_new |= isinstance(new, (*_PLAIN_CONTAINERS, functools.partial))
        if not same:
            self._note()
        return None


def package_of(hook: Any) -> str:
    """The package in which a function, or the class of another callable, is written."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.split(".")[0]


def _effective(hooks: list[Any]) -> list[Any]:
    """Leaves out hooks that ask for gradients which an equal hook before them has asked for.

    transformers registers one more each time that gradient checkpointing is turned on, which TRL
    does at each step.
    """
    asking, kept = set[types.CodeType](), list[Any]()
    for hook in hooks:
        if not _asks_for_gradients(hook):
            kept.append(hook)
        elif hook.__code__ not in asking:
            asking.add(hook.__code__)
            kept.append(hook)
    return kept


def _asks_for_gradients(hook: Any) -> bool:
    """Whether all that a hook can do is call `requires_grad_` of what it is given.

    transformers and peft have one on the embedding of a model with gradient checkpointing.
    """
    code = hook.__code__ if isinstance(hook, types.FunctionType) else None
    return code is not None and not code.co_freevars and code.co_names == ("requires_grad_",)


class ModuleWatch:
    """Holds everything a module's forward could depend on: submodules, attributes, hooks, modes.

    As a context it undoes all changes at its end.

    Values are compared by identity, all in one pass; where one is another, plain values, functions
    made anew of the same lines, and partial and bound calls of equal ones are equal. Lists, dicts,
    sets, deques, modules that are no submodules, what bound methods and partial calls hold, and
    objects with attributes whose classes are not a library's are followed three levels deep.
    Generators of random numbers, and tensors that are neither parameters nor buffers, are compared
    by content.

    Args:
        module: the user's module.
        others: more containers, by name.

    Attributes:
        parameters: the module's parameters.
        hook: a hook that has to run at each step, or None: neither torch's nor spmdzero's own, nor
            one that only has an output require a gradient.
    """

    def __init__(self, module: nn.Module, others: dict[str, Any]) -> None:
        self._made_of = module, others
        self.parameters = tuple(module.parameters())
        self.hook: str | None = None
        self._watched: list[_Watched] = []
        self._contents: list[WatchedContent] = []
        self._followed: list[Any] = []
        # Steps write parameters and buffers, and programs take them as they are.
        seen = {id(tensor) for tensor in (*self.parameters, *module.buffers())}
        parts = {f"submodule {p!r}" if p else "the module": m for p, m in module.named_modules()}
        self._add_modules(parts, seen, _DEPTH)
        for name, container in others.items():
            self._add(name, container, seen)
        containers = [watched.container for watched in self._watched]
        self._empty = [container for container in containers if not container]
        self._mappings = [c for c in containers if c and isinstance(c, dict)]
        self._sequences = [c for c in containers if c and not isinstance(c, dict)]
        self._values = [*self._now()]

    def __enter__(self) -> "ModuleWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def change(self) -> str | None:
        """The change in words, or None."""
        # It makes no list of the present values, which takes half a millisecond for 1,000 modules.
        pairs = itertools.zip_longest(self._now(), self._values, fillvalue=_NOTHING)
        same = not any(self._empty) and all(itertools.starmap(operator.is_, pairs))
        for watched in self._contents if same else (*self._contents, *self._watched):
            if change := watched.change():
                return change
        if same:
            return None
        if any(watched.has_new for watched in self._watched):
            # What is written into an equal container from now on has to be seen, too.
            vars(self).update(vars(ModuleWatch(*self._made_of)))
        else:
            self._values = [*self._now()]
        return None

    def restore(self) -> None:
        """Undoes all changes."""
        for watched in (*self._contents, *self._watched):
            if watched.change():
                watched.restore()

    def _now(self) -> Iterator[Any]:
        mappings = map(_VALUES_OF, self._mappings)
        return itertools.chain(
            itertools.chain.from_iterable(mappings),
            itertools.chain.from_iterable(self._sequences),
            itertools.chain.from_iterable(self._followed),
        )

    def _add_modules(self, parts: dict[str, nn.Module], seen: set[int], depth: int) -> None:
        """Adds modules by name, and what their attributes hold that is none of them."""
        new = {name: part for name, part in parts.items() if id(vars(part)) not in seen}
        for name, part in new.items():
            self._add(name, vars(part), seen)
            for registry in _REGISTRIES:
                content = getattr(part, registry)
                what = f"{registry.strip('_')} of {name}"
                self._add(what, content, seen, hooks=registry in HOOKS)
                if registry in HOOKS:
                    self._find_hook(HOOKS[registry], name, content.values())
        for name, part in new.items():
            attributes = {k: v for k, v in vars(part).items() if k not in _REGISTRIES}
            for key, value in (attributes | part._parameters).items():
                self._follow(f"{key!r} of {name}", value, seen, depth)

    def _find_hook(self, kind: str, name: str, hooks: Iterable[Any]) -> None:
        for hook in hooks:
            own = package_of(hook) in ("torch", "spmdzero")
            if not own and not _asks_for_gradients(hook):
                called = getattr(hook, "__qualname__", type(hook).__name__)
                self.hook = self.hook or f"{called}, a {kind} of {name}"

    def _follow(self, name: str, value: Any, seen: set[int], depth: int) -> None:
        if id(value) not in seen and (content := content_of(name, value)) is not None:
            seen.add(id(value))
            self._contents.append(content)
        for behind in _behind(value):
            self._follow(name, behind, seen, depth)
        if isinstance(value, nn.Module) and depth and not _lives_outside(value):
            parts = value.named_modules()
            named = {f"submodule {p!r} of {name}" if p else name: part for p, part in parts}
            self._add_modules(named, seen, depth)
        container = _container(value)
        if container is None or depth == 0 or len(container) > _MOST_ITEMS:
            return
        if id(container) in seen:
            return
        self._add(name, container, seen)
        if isinstance(container, dict) and container:
            # Its keys are watched too; a module's own attributes hardly change their names.
            self._followed.append(container)
        for key, item in _items(container):
            self._follow(f"{key!r} of {name}", item, seen, depth - 1)

    def _add(self, name: str, container: Any, seen: set[int], *, hooks: bool = False) -> None:
        if id(container) not in seen:
            seen.add(id(container))
            self._watched.append(_Watched(name, container, hooks=hooks))


def device_attributes(module: nn.Module) -> list[torch.Tensor]:
    """Computed tensors on the devices that are attributes of a submodule, but not its state."""
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    values = [value for part in module.modules() for value in vars(part).values()]
    tensors = [v for v in values if isinstance(v, torch.Tensor) and id(v) not in own]
    tensors = [tensor for tensor in tensors if arrays.is_mine(tensor)]
    pending = arrays.are_pending(tensors)
    return [tensor for tensor, pends in zip(tensors, pending, strict=True) if not pends]


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _container(value: Any) -> Any:
    if isinstance(value, dict | list | tuple | set | collections.deque):
        return value
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return vars(value)
    if isinstance(value, nn.Module | torch.Tensor | type | enum.Enum):
        return None
    # Objects of a library hold its own caches, locks and counters; a model's card tells of a
    # training, and is written at each line of its log.
    homes = _homes(value)
    left_out = homes[0] in _LIBRARIES or _CARDS in homes
    return None if left_out else getattr(value, "__dict__", None)


def _behind(value: Any) -> tuple[Any, ...]:
    """Lists what a bound method or a partial call computes with."""
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    return ()


def _lives_outside(module: nn.Module) -> bool:
    """Whether no forward can depend on it: an engine, or a metric, which is made of outputs."""
    return not {"spmdzero", "torchmetrics"}.isdisjoint(_homes(module))


def _homes(value: Any) -> list[str]:
    """The packages of the classes of `value`, its own class first."""
    return [kind.__module__.partition(".")[0] for kind in type(value).__mro__]


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    yield from container.items() if isinstance(container, dict) else enumerate(container)


def _is_same_key(one: Any, other: Any) -> bool:
    # An optimizer's state has tensors as keys, and == compares tensors element by element.
    return one is other or (not isinstance(one, torch.Tensor) and one == other)


def _is_same_value(old: Any, new: Any, depth: int) -> bool:
    """Whether two values are equal: numbers, texts, functions, calls, and containers of such."""
    if type(old) is not type(new):
        return False
    if isinstance(old, _PLAIN_CONTAINERS) and type(old) in _PLAIN_CONTAINERS:
        if depth == 0 or not len(old) == len(new) <= _MOST_ITEMS:
            return False
        # Code goes through a dict in its order.
        ways = [itertools.chain(*c.items()) if isinstance(c, dict) else c for c in (old, new)]
        return _are_same(*ways, depth=depth - 1)
    if isinstance(old, types.FunctionType | functools.partial):
        if isinstance(old, types.FunctionType) and old.__code__.co_freevars:
            return False
        return _are_same(*map(_parts, (old, new)), depth=depth)
    if isinstance(old, RemovableHandle):
        # All that it can do is remove its hook, and hooks are watched.
        return True
    return isinstance(old, (*_NUMBERS, types.MethodType)) and old == new


def _are_same(olds: Iterable[Any], news: Iterable[Any], *, depth: int) -> bool:
    pairs = zip(olds, news, strict=True)
    return all(a is b or _is_same_value(a, b, depth) for a, b in pairs)


def _parts(call: Any) -> tuple[Any, ...]:
    """The parts that decide a function without variables of others, or a partial call."""
    if isinstance(call, functools.partial):
        return call.func, call.args, call.keywords
    fixed = call.__defaults__, call.__kwdefaults__, call.__dict__
    return id(call.__code__), id(call.__globals__), *fixed


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, _NUMBERS) else f"a {type(value).__name__}"
