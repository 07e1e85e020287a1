"""What each module of a model costs."""

import dataclasses
from collections import Counter
from collections.abc import Iterable

from torch import nn

from spmdzero.inspect import Matmul
from spmdzero.profiling.flops_profiler._scopes import module_of
from spmdzero.show import _flops as _render


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """One module, with all that it contains.

    Attributes:
        name: its dotted name, ``""`` for the model.
        kind: its class.
        params: elements of its parameters.
        macs: multiply-accumulate operations of its forward, on one device in one micro-batch.
    """

    name: str
    kind: str
    params: int
    macs: int

    @property
    def depth(self) -> int:
        """0 for the model, 1 for its children."""
        return self.name.count(".") + 1 if self.name else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The matrix multiplications and convolutions of one micro-batch on one device.

    Attributes:
        modules: the model and every module in it, parents first.
        other_macs: of backward (with what it recomputes), of a loss outside of the model and of
            the update; 0 for a forward alone.
    """

    modules: tuple[ModuleProfile, ...]
    other_macs: int

    @classmethod
    def of(cls, model: nn.Module, matmuls: Iterable[Matmul]) -> "ModelProfile":
        """The profile of a program that was traced under `module_scopes(model)`."""
        own: Counter[str | None] = Counter()
        for matmul in matmuls:
            own[module_of(matmul.op_name)] += matmul.macs
        modules = tuple(
            ModuleProfile(
                name=name,
                kind=type(module).__name__,
                params=sum(parameter.numel() for parameter in module.parameters()),
                macs=sum(macs for inner, macs in own.items() if _within(inner, name)),
            )
            for name, module in model.named_modules()
        )
        return cls(modules=modules, other_macs=own[None])

    @property
    def params(self) -> int:
        """Elements of all parameters."""
        return self.modules[0].params

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of the forward of one micro-batch on one device."""
        return self.modules[0].macs

    @property
    def flops(self) -> int:
        """Floating-point operations of the same: two for each multiply-accumulate."""
        return 2 * self.macs

    def text(
        self, *, facts: dict[str, str], module_depth: int, top_modules: int, detailed: bool
    ) -> str:
        """The report, as DeepSpeed arranges it (profiling/flops_profiler/profiler.py).

        Args:
            facts: lines of the summary that the program doesn't tell, such as world sizes.
            module_depth: how many levels to aggregate, -1 for all.
            top_modules: classes to name at each level.
            detailed: whether each module is listed.
        """
        return _render.report(
            self,
            facts=facts,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
        )


def _within(inner: str | None, name: str) -> bool:
    return inner is not None and (not name or inner == name or inner.startswith(name + "."))
