"""An optimizer's masters and states, gathered from the files that hold them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spmdzero.formats._state import StoredTensor
from spmdzero.formats.deepspeed._flat import Group
from spmdzero.formats.deepspeed._model_file import ModelFile
from spmdzero.formats.deepspeed._pickles import damaged

Order = Sequence[Sequence[str]]
MASTER, STEP = "fp32", "step"
"""Names of two optimizer states: the fp32 weights, and the number of their updates."""
NUMBER = "#"
"""Prefix of a parameter's number where its name is not known."""
# Keys that choose between a torch optimizer's implementations, which don't affect results.
_SWITCHES = ("foreach", "fused", "capturable", "params", "step", "param_names")


@dataclasses.dataclass(kw_only=True)
class SavedOptimizer:
    """The contents of an optimizer's files.

    Attributes:
        model: the file of the model that it trains.
        scaler: the loss scale, as DeepSpeed pickles it or as a dict of it; None for none.
        tensors: masters and states by the names of `TrainingState.tensors`.
        groups: the hyperparameters of each param group, with the names of its parameters.
        steps: the step in each parameter's state, 0-dim or a number.
    """

    model: ModelFile
    scaler: Any = None
    tensors: dict[str, StoredTensor] = dataclasses.field(default_factory=dict)
    groups: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    steps: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add_group(self, group: Mapping[str, Any], names: Iterable[str]) -> None:
        """Adds the hyperparameters of a torch param group with the parameters `names`."""
        kept = {key: value for key, value in group.items() if key not in _SWITCHES}
        self.groups.append(kept | {"params": list(names)})

    def add(self, name: str, states: Mapping[str, Any], *, file: Path) -> None:
        """Adds one parameter's states by slot: tensors of its shape, or single numbers.

        Raises:
            SpmdZeroCheckpointError: a state, from `file`, has another shape.
        """
        for slot, value in states.items():
            if slot == STEP:
                self.steps[name] = value
            elif slot != MASTER and _is_scalar(value):
                number = torch.as_tensor(value, dtype=torch.float32)
                self.tensors[f"{slot}/{name}"] = StoredTensor.of(number)
            else:
                if isinstance(value, torch.Tensor):
                    value = StoredTensor.of(value.detach())
                self._require_shape(name, slot, value, file)
                self.tensors[f"{self._role(name, slot)}/{name}"] = value

    def add_flat(
        self,
        group: Group,
        ranks: Sequence[Mapping[str, Any]],
        *,
        files: Sequence[Path],
        padded: bool = False,
    ) -> None:
        """Adds a param group's states by slot, given each rank's part of the flat tensor.

        Args:
            group: the layout of the parameters.
            ranks: for each rank, slot -> part, or single number.
            files: the file of each rank.
            padded: whether there may be more elements than the parameters have.

        Raises:
            SpmdZeroCheckpointError: a slot is missing, or has a wrong number of elements.
        """
        for slot, value in ranks[0].items():
            if slot == STEP or _is_scalar(value):
                states = dict.fromkeys(group.shapes, value)
            else:
                parts = []
                for rank, file in zip(ranks, files, strict=True):
                    if slot not in rank:
                        raise damaged(file, f"it has no {slot}, which the other ranks have")
                    parts.append(rank[slot].detach().reshape(-1))
                held = sum(part.numel() for part in parts)
                if held < group.numel or (held > group.numel and not padded):
                    raise damaged(
                        files[0],
                        f"{slot} of a param group has {held} elements in all ranks' files, its "
                        f"parameters have {group.numel}",
                    )
                states = {name: group.stored(name, parts) for name in group.shapes}
            for name, state in states.items():
                self.add(name, {slot: state}, file=files[0])

    def _role(self, name: str, slot: str) -> str:
        if slot != MASTER:
            return slot
        # An fp32 parameter is its own master; the optimizer's copy is the updated one.
        own = self.model.parameters[name].dtype == torch.float32
        return "parameter" if own else "master"

    def _require_shape(self, name: str, slot: str, value: Any, file: Path) -> None:
        parameter = self.model.parameters.get(name)
        expected = None if parameter is None else parameter.shape
        found = getattr(value, "shape", type(value).__name__)
        if found != expected and not name.startswith(NUMBER):
            wanted = "is not in the model's file" if expected is None else f"has {list(expected)}"
            raise damaged(
                file,
                f"{slot} of {name} has shape {found}, the parameter {wanted}",
                "Load a whole checkpoint of one model, with the param groups, in their order, of "
                "the run that saved it",
            )


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, int | float)
