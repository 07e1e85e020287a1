"""Hooks that engines leave on a module, and that the module's next engine removes."""

from typing import Any

from torch import nn

_REGISTRIES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class ModuleHook:
    """A hook, or an object whose methods are hooks, of a module that an engine trains."""

    @property
    def outlived(self) -> bool:
        """Whether the hook can be removed when a new one of its kind is registered."""
        raise NotImplementedError

    def take_the_place_of_outlived(self, module: nn.Module) -> None:
        """Removes outlived hooks of this kind from `module` and all of its submodules."""
        for part in module.modules():
            for registry in _REGISTRIES:
                hooks = getattr(part, registry)
                for key in [key for key, hook in hooks.items() if self._outlives(hook)]:
                    del hooks[key]
                    for which in ("with_kwargs", "always_called"):
                        getattr(part, f"{registry}_{which}", {}).pop(key, None)

    def _outlives(self, hook: Any) -> bool:
        other = object_of(hook)
        return type(other) is type(self) and other is not self and other.outlived


def is_trained(module: nn.Module) -> bool:
    """Whether an engine has left hooks on `module`, or on a module that it is a part of."""
    found = [hook for registry in _REGISTRIES for hook in getattr(module, registry).values()]
    return any(isinstance(object_of(hook), ModuleHook) for hook in found)


def object_of(hook: Any) -> Any:
    """Finds the object whose method a hook is, or the hook itself; torch wraps some hooks."""
    hook = getattr(hook, "hook", hook)
    return getattr(hook, "__self__", hook)
