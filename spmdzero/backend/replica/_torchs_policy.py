"""torch's selective checkpointing, whose policy says of each operation whether its result stays."""

import collections
import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint as torchs
from torch.utils._pytree import tree_map_only

from spmdzero._dispatch_mode import DispatchMode
from spmdzero.backend._current import arrays
from spmdzero.backend.forms._quantized import SCALED_PRODUCT
from spmdzero.backend.replica import _keepers
from spmdzero.backend.replica._anchors import Anchors
from spmdzero.backend.replica._kept_by_name import AttentionWatch, in_place_of
from spmdzero.backend.replica._recompute import (
    Runs,
    can_rest,
    can_rest_on_host,
    loop_body,
    recomputed_but,
)

# What a linear layer is, of which a product of 8 bits is none, and stands for all.
_OF_LINEAR = tuple(
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "linear", "bmm")
)
# A policy names attention by one of these. What attends here is none of them, and stands for all.
_ATTENTION = tuple(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_attention_math",
        "scaled_dot_product_attention",
    )
    if hasattr(torch.ops.aten, name)
)
_STAYS, _ON_HOST = (
    {policy for policy in torchs.CheckpointPolicy if policy.name.endswith(end)}
    for end in ("_SAVE", "_CPU_OFFLOAD")
)
_TOLD_OUTPUT = "op_output" in inspect.signature(torchs.SelectiveCheckpointContext).parameters


class KeepsByPolicy(DispatchMode):
    """Keeps the results of operations as a policy of torch's says.

    torch's own modes would return the very values of the first run, see `Runs`. Views and what is
    written in place are computed again, whatever the policy says. It is asked in the first run
    alone, as policies count, and later runs do the same.

    Args:
        policy: of torch's `create_selective_checkpoint_contexts`.
        fresh: makes another with the same policy, begun anew.
        anchors: those of a loop whose body runs; None where the function runs again.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        *,
        fresh: "Callable[[], KeepsByPolicy]",
        anchors: Anchors | None,
    ) -> None:
        super().__init__()
        self._policy, self._fresh, self._anchors = policy, fresh, anchors
        self.runs = Runs()
        self.kernels = 0
        self._around, self._attention = contextlib.ExitStack(), AttentionWatch(self)
        # Of each operation the answers in the first run; None where nothing is kept.
        self._said: dict[Any, list[bool | None]] = collections.defaultdict(list)
        self._left: dict[Any, Iterator[bool | None]] = {}

    def __enter__(self) -> "KeepsByPolicy":
        self.runs.begin()
        self._left = {what: iter(said) for what, said in self._said.items()}
        _keepers.enter(self)
        self._around.enter_context(self._attention)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._around.close()
        _keepers.leave()
        self.runs.end()

    def in_body(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs a block as the body of a loop, which keeps as the policy says."""
        with self._fresh():
            return call(*args, **kwargs)

    def again(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs a function, and again in the backward pass, by the same policy."""
        return recomputed_but(self._fresh(), function, args, kwargs)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation, whose results are kept if the policy says so."""
        made = func(*args, **kwargs)
        if func in torchs.SAC_IGNORED_OPS or not _keepers.is_innermost(self):
            return made
        asked = _OF_LINEAR if func is SCALED_PRODUCT else (func,)
        where = self._where(func, lambda: self._first_of(asked, made, *args, **kwargs))
        schema = getattr(func, "_schema", None)
        views = schema and any(each.alias_info is not None for each in schema.returns)
        if where is None or views:
            return made
        return tree_map_only(torch.Tensor, lambda tensor: self._kept(tensor, where), made)

    def of_kernel(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that replace the results of an attention kernel."""
        self.kernels += 1
        where = self._of_attention(values[0])
        return values if where is None else [self._kept(v.detach(), where).detach() for v in values]

    def context(self, made: torch.Tensor) -> torch.Tensor:
        """The tensor that replaces the output of attention that no kernel has computed."""
        where = self._of_attention(made)
        return made if where is None else in_place_of(made, self._kept(made.detach(), where))

    def _of_attention(self, made: torch.Tensor) -> bool | None:
        given = self._attention.given or (made, made, made)
        return self._where(_ATTENTION, lambda: self._first_of(_ATTENTION, made, *given))

    def _where(self, what: Any, ask: Callable[[], bool | None]) -> bool | None:
        """Whether a result rests in the host's memory, None if nowhere; as in the first run."""
        if self.runs.are_first:
            self._said[what].append(ask())
            return self._said[what][-1]
        return next(self._left.get(what, iter(())), None)

    def _first_of(self, names: Iterable[Any], made: Any, *args: Any, **kwargs: Any) -> bool | None:
        """The first answer to one of the names that keeps the result, None if none does."""
        found = (self._asked(func, made, *args, **kwargs) for func in names)
        return next((where for where in found if where is not None), None)

    def _asked(self, func: Any, made: Any, *args: Any, **kwargs: Any) -> bool | None:
        told = {"op_output": made} if _TOLD_OUTPUT else {}
        context = torchs.SelectiveCheckpointContext(is_recompute=False, **told)
        said = self._policy(context, func, *args, **kwargs)
        if said is True or said in _STAYS:
            return False
        return True if said in _ON_HOST else None

    def _kept(self, made: torch.Tensor, on_host: bool) -> torch.Tensor:
        if not arrays.is_mine(made):
            return made
        on_host = on_host and can_rest(made) and can_rest_on_host()
        keep = self.runs.kept if self._anchors is None else self._anchors.kept
        # What keeps a value is no operation of the function's.
        with _keepers.set_aside():
            return keep(made, on_host=on_host)


def kept_by_policy(context_fn: Callable[[], Any]) -> KeepsByPolicy | None:
    """The keeper of a `context_fn` of torch's checkpoint, with the anchors of the loop that runs.

    None where its contexts are not those of torch's `create_selective_checkpoint_contexts`.
    """
    policy = getattr(context_fn()[0], "policy_fn", None)
    if policy is None:
        return None

    def fresh() -> KeepsByPolicy:
        again = kept_by_policy(context_fn)
        assert again is not None
        return again

    return KeepsByPolicy(policy, fresh=fresh, anchors=loop_body())
