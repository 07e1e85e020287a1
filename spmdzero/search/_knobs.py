"""One way to train a model on a slice, as the keys of the JSON that say so."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spmdzero.config import set_keys

ROWS, ACCUMULATION, ALL_ROWS = (
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
)  # fmt: skip
STAGE, MESH = "zero_optimization.stage", "spmd.mesh"
GROUP = "zero_optimization.zero_hpz_partition_size"
DEFAULTS: Mapping[str, Any] = {
    MESH: {"fsdp": -1},
    GROUP: 1,
    "spmd.recompute": "nothing",
    "spmd.scan": "off",
    "spmd.fused_loss": False,
    "spmd.attention": "auto",
    "spmd.xla_flags": "none",
    "zero_optimization.offload_optimizer": {"device": "none"},
    "zero_optimization.offload_param": {"device": "none"},
}
"""Key of a knob -> what a JSON says that doesn't name it. Stage and batch are always named."""

POLICIES = ("nothing", "everything", "dots", "offload")
"""Words that a JSON has for what is computed again."""


@dataclass(frozen=True, kw_only=True)
class Stays:
    """A policy by the names of what stays of a block beside its input.

    Attributes:
        names: of modules, or ``"context"``, which is attention's output.
        on_host: whether that is in the host's memory.
    """

    names: tuple[str, ...]
    on_host: bool = False

    @property
    def policy(self) -> dict[str, list[str]]:
        """The value in the JSON."""
        return {"offload" if self.on_host else "keep": [*self.names]}

    def __str__(self) -> str:
        return ", ".join(self.names) + " on the host" * self.on_host


CONTEXT, CONTEXT_ON_HOST = Stays(names=("context",)), Stays(names=("context",), on_host=True)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to train, of which each knob is a key of the JSON.

    Attributes:
        stage: of ZeRO.
        data, sequence, tensor: devices of these mesh axes; fsdp has the others.
        group: ``zero_hpz_partition_size`` of stage 3; 1 for none.
        rows: rows of a micro-batch on each replica.
        accumulation: micro-batches of a step.
        recompute: a policy of ``"spmd": {"recompute": ...}``.
        kept: number of the last blocks that compute nothing again, whatever `recompute` is.
        scan: whether equal blocks are a loop.
        fused_loss: whether the loss is computed without logits.
        attention: ``"auto"`` or ``"plain"``.
        host: what rests in host memory: of ``"optimizer"`` and ``"param"``.
        flags: the set of the compiler's flags.
    """

    stage: int
    rows: int
    accumulation: int
    data: int = 1
    sequence: int = 1
    tensor: int = 1
    group: int = 1
    recompute: str | Stays = "nothing"
    kept: int = 0
    scan: bool = False
    fused_loss: bool = False
    attention: str = "auto"
    host: tuple[str, ...] = ()
    flags: str = "none"

    @property
    def placing(self) -> "Candidate":
        """The same with one value for all knobs that don't change where the states rest."""
        return replace(
            self, rows=1, accumulation=min(self.accumulation, 2), recompute="nothing", kept=0,
            scan=False, fused_loss=False, attention="auto", flags="none",
        )  # fmt: skip

    @property
    def mesh(self) -> tuple[int, int, int, int]:
        """The sizes that decide the devices' mesh."""
        return self.data, self.sequence, self.tensor, self.group

    def keys(self, *, blocks: "Blocks") -> dict[str, Any]:
        """Dotted key -> value of every knob that has no default value, and of stage and batch."""
        found: dict[str, Any] = {
            STAGE: self.stage, ROWS: self.rows, ACCUMULATION: self.accumulation
        }  # fmt: skip
        axes = {axis: getattr(self, axis) for axis in ("data", "sequence", "tensor")}
        said = {
            MESH: {"fsdp": -1, **{axis: size for axis, size in axes.items() if size > 1}},
            GROUP: self.group,
            "spmd.recompute": self._policy(blocks),
            "spmd.scan": "on" if self.scan else "off",
            "spmd.fused_loss": self.fused_loss,
            "spmd.attention": self.attention,
            "spmd.xla_flags": self.flags,
            **{
                f"zero_optimization.offload_{what}": {
                    "device": "cpu" if what in self.host else "none"
                }
                for what in ("optimizer", "param")
            },
        }
        return found | {key: value for key, value in said.items() if value != DEFAULTS[key]}

    def _policy(self, blocks: "Blocks") -> str | Mapping[str, Any]:
        if not self.kept:
            return self.recompute.policy if isinstance(self.recompute, Stays) else self.recompute
        last = range(blocks.count - self.kept, blocks.count)
        said = {f"{blocks.name}.{place}": "nothing" for place in last}
        return {**said, f"{blocks.name}.*": self.recompute}

    @property
    def plainness(self) -> int:
        """Number of knobs that have no default value: of two equal ways the plainer is taken."""
        return len(self.changes_from(Candidate(stage=self.stage, rows=self.rows,
                                               accumulation=self.accumulation)))  # fmt: skip

    def changes_from(self, other: "Candidate") -> list[str]:
        """The names of the knobs in which they differ."""
        return [name for name in _KNOBS if getattr(self, name) != getattr(other, name)]

    def words(self) -> str:
        """The knobs that have no default value, in a line."""
        return ", ".join(self._words())

    def _words(self) -> Iterator[str]:
        yield f"stage {self.stage}"
        axes = [(axis, getattr(self, axis)) for axis in ("data", "sequence", "tensor")]
        yield from (f"{axis}={size}" for axis, size in axes if size > 1)
        if self.group > 1:
            yield f"groups of {self.group}"
        yield f"{self.rows} row{'s' * (self.rows > 1)} x {self.accumulation}"
        if self.recompute != "nothing":
            kept = f" but of {self.kept} blocks" if self.kept else ""
            but = "all but " * isinstance(self.recompute, Stays)
            yield f"recompute {but}{self.recompute}{kept}"
        if self.scan:
            yield "loop"
        if self.fused_loss:
            yield "fused loss"
        if self.attention != "auto":
            yield f"{self.attention} attention"
        yield from (f"{what} on the host" for what in self.host)
        if self.flags != "none":
            yield f"flags {self.flags}"


_KNOBS = tuple(Candidate.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The longest row of equal blocks of a model.

    Attributes:
        name: of the ModuleList or Sequential that holds them; "" if there are none.
        count: number of blocks.
    """

    name: str = ""
    count: int = 0


def with_keys(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config with these values, by dotted key.

    The batch is said by its micro-batch and their number, and ``train_batch_size`` follows.
    """
    made = copy.deepcopy(dict(config))
    made.pop(ALL_ROWS, None)
    return set_keys(made, copy.deepcopy(dict(keys)))


# Key -> why it says what it says, shown beside the chosen JSON.
REASONS = {
    STAGE: "what is sharded: 1 states, 2 gradients too, 3 parameters too",
    ROWS: "rows of a micro-batch on each replica",
    ACCUMULATION: "micro-batches of a step",
    MESH: "devices of each mesh axis",
    "spmd.recompute": "what backward computes again instead of keeping it",
    "spmd.scan": "whether equal blocks are compiled once, as a loop",
    "spmd.fused_loss": "whether the loss is computed without logits",
    "spmd.attention": "how attention is computed",
    "spmd.xla_flags": "the TPU compiler's flags",
    GROUP: "devices that share one copy of the parameters",
    "zero_optimization.offload_optimizer": "states rest in host memory",
    "zero_optimization.offload_param": "parameters rest in host memory",
}
