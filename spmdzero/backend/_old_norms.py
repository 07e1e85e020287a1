"""`torch.nn.utils.weight_norm` and `spectral_norm`, the ones without parametrizations."""

from torch import nn

# torch's names: functions of these names hide the modules that the classes of the hooks are in.
_HOOKS = {
    ("torch.nn.utils.weight_norm", "WeightNorm"): "weight_norm",
    ("torch.nn.utils.spectral_norm", "SpectralNorm"): "spectral_norm",
}


def old_norms(part: nn.Module) -> dict[str, str]:
    """The attributes of `part` that such a norm computes before each forward -> its name."""
    found = {}
    for hook in part._forward_pre_hooks.values():
        norm = _HOOKS.get((type(hook).__module__, type(hook).__name__))
        if norm is not None:
            found[str(vars(hook)["name"])] = norm
    return found


def old_norm_error(path: str, norm: str) -> str:
    """The text of the error about an attribute at `path`."""
    return (
        f"torch.nn.utils.{norm}, the old one, computes {path!r} before each forward and keeps it "
        "in the attribute, where it belongs to one replica. Use "
        f"torch.nn.utils.parametrizations.{norm}, which computes it where it is used"
    )
