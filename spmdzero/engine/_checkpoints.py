"""Checkpoints under DeepSpeed's method names."""

import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdzero._to_launcher import tell
from spmdzero.backend import runtime
from spmdzero.backend.hosts import processes
from spmdzero.engine._accumulation import Accumulation
from spmdzero.engine._progress import look
from spmdzero.errors import UsageValueError
from spmdzero.formats import (
    BackgroundSaver,
    Box,
    Retention,
    SaveOrder,
    TrainingState,
    check_tag,
    held_for,
    latest_tag,
    naming_the_newest,
    newest_complete,
    save_native,
)
from spmdzero.state._from_deepspeed import open_for
from spmdzero.state._live_state import live_state
from spmdzero.state._restore import LoadOptions, restore
from spmdzero.state._same_on_hosts import agreed_tag, everyones, require_one_tag, together
from spmdzero.state._still_placed import require_placed
from spmdzero.state._tensor_matching import LoadReport
from spmdzero.state._training import Training

logger = logging.getLogger("spmdzero")

# Packages whose versions the manifest of a checkpoint names, if they are installed.
_VERSIONS = ("spmdzero", "torch", "torch_xla", "jax")
_COUNTERS = ("global_steps", "micro_steps", "global_samples")
_POSITION = ("epoch", "rows", "handed_out", "finished")
# A tag's folder -> the engine that saved it last.
_SAVERS: weakref.WeakValueDictionary[str, "Checkpoints"] = weakref.WeakValueDictionary()


class Checkpoints:
    """Saves and loads the state of `training`.

    Attributes:
        load_report: the names that the latest non-strict load left as they were.
    """

    load_report: LoadReport | None = None

    def __init__(self, training: Training, accumulation: Accumulation) -> None:
        self._training, self._accumulation = training, accumulation
        self._saver = BackgroundSaver()

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves everything that training needs to continue exactly as if it had not stopped.

        Every process calls it. Earlier checkpoints in `save_dir` stay valid until the new one is
        complete. With ``"checkpoint": {"async": true}`` it returns as soon as the state is in the
        host's memory, and the files are written while training goes on.

        Args:
            save_dir: folder of all checkpoints of a run, seen by all hosts.
            tag: the checkpoint's own folder in it; ``global_step<n>`` by default.
            client_state: the caller's own state as it is now, which `load_checkpoint` returns:
                numbers, strings, tensors, numpy's arrays, paths, dates, and dicts, lists, tuples
                and namespaces of them.
            save_latest: whether the file `latest` names this checkpoint.
            exclude_frozen_parameters: leave out parameters that don't require gradients.

        Returns True.

        Raises:
            SpmdZeroCheckpointError: this checkpoint can't be saved, or the asynchronous save before
                it failed, on any host.
            UsageValueError: no folder is named.
            SpmdZeroUsageError: between backward and step, a tag that is no name of a folder, or a
                client state that can't be loaded safely.
            ReplicaRegionError: an integer output or buffer differs between replicas.
        """
        training = self._training
        self._accumulation.refuse_inside("save_checkpoint")
        if training.region is not None and training.state.flags:
            # An evaluation's pending graph is compiled as a whole, not for its flags alone.
            runtime.sync()
            look(training)
        if not save_dir:
            raise UsageValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        folder = Path(save_dir)
        _name_newest_of(folder)
        with together(folder, doing="saved"):
            self.wait_checkpoint()
            state = live_state(
                training, exclude_frozen=exclude_frozen_parameters, client_state=client_state
            )
            step = training.counters.global_steps
            tag = check_tag(f"global_step{step}" if tag is None else str(tag))
        order = _order(training, folder, tag, latest=save_latest)
        self._tell_of_others(order.path)
        if training.spmd_config.checkpoint.asynchronous:
            self._saver.start(functools.partial(_save, held_for(order, state), order))
        else:
            _save(state, order)
        return True

    def _tell_of_others(self, path: Path) -> None:
        """Warns if another engine of this process saved the checkpoint that this one replaces."""
        place = os.path.realpath(path)
        if _SAVERS.get(place, self) is not self:
            logger.warning(
                "%s, which another engine of this process has saved, is replaced: give each "
                "engine a folder, or tags, of its own", path
            )  # fmt: skip
        _SAVERS[place] = self

    def wait_checkpoint(self) -> None:
        """Waits until the asynchronous save under way is complete.

        Raises:
            SpmdZeroCheckpointError: the save failed; earlier checkpoints are as they were.
        """
        self._saver.wait()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads a checkpoint that was saved on any number of devices and at any ZeRO stage.

        Everything is checked before anything changes.

        Args:
            load_dir: folder of the checkpoints.
            tag: the checkpoint's folder; by default the one that the file `latest` names.
                Checkpoints that DeepSpeed wrote are recognised, of every stage, regular and
                universal.
            load_module_strict: require the names of the module's parameters and buffers; otherwise
                the tensors that both have are loaded, and `load_report` names the others.
            load_optimizer_states: if False, masters are made from the loaded parameters, and the
                rest of the optimizer's state stays.
            load_lr_scheduler_states: if False, the schedule stays as it is.
            load_module_only: load parameters and buffers, nothing else.
            custom_load_fn: called as ``custom_load_fn(src=state_dict, dst=module)`` to load the
                module; `src` is whole, on the CPU.

        Returns the checkpoint's path and its client state; None and None if `tag` is None and
        nothing was saved yet.

        Raises:
            SpmdZeroCheckpointError: the checkpoint is damaged, incomplete or of a different model
                or format. The message gives the file, the reason and the newest other complete tag.
                The engine is as it was, on every host.
        """
        training, folder = self._training, Path(load_dir)
        _name_newest_of(folder)
        tag = self._common_tag(folder, tag)
        if tag is None:
            logger.warning(
                "no checkpoint was loaded: there is no file %s. If there should be one, check the "
                "folder or name a tag", folder / "latest"
            )  # fmt: skip
            return None, None
        options = LoadOptions(
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
        with naming_the_newest(folder, but=tag):
            with together(folder / tag, doing="loaded"):
                require_placed(training)
                state = open_for(training, folder, tag)
            self.load_report = report = restore(training, _checked(state, folder / tag), options)
        for what, names in dataclasses.asdict(report).items():
            if names:
                logger.warning("loaded %s: %s %s", folder / tag, what, ", ".join(names))
        return state.source, dict(state.host.client_state)

    def _common_tag(self, folder: Path, tag: str | None) -> str | None:
        """The tag that all processes are about to load, or None if nothing was saved yet."""
        universal = self._training.spmd_config.checkpoint.load_universal
        with naming_the_newest(folder):
            with together(folder, doing="loaded"):
                self.wait_checkpoint()
                tag = latest_tag(folder, universal=universal) if tag is None else str(tag)
            require_one_tag(folder, everyones(tag))
        return tag


def _save(state: TrainingState, order: SaveOrder) -> None:
    save_native(state, order)
    if order.latest:
        tell("saved", str(order.folder / order.tag))


def _name_newest_of(folder: Path) -> None:
    """Lets a host that another host's failure ends name the checkpoint to resume from."""

    def find() -> str | None:
        tag = newest_complete(folder)
        return None if tag is None else str(folder / tag)

    processes.name_newest(find)


def _checked(state: TrainingState, path: Path) -> TrainingState:
    """The same state with a check whose failure on one host is raised on every host."""

    def check(parts: Mapping[str, Iterable[Box]]) -> None:
        with together(path, doing="loaded"):
            state.check(parts)

    return dataclasses.replace(state, check=check)


def _versions() -> Iterator[tuple[str, str]]:
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _order(training: Training, folder: Path, tag: str, *, latest: bool) -> SaveOrder:
    settings, counters = training.spmd_config.checkpoint, training.counters
    loader = training.training_dataloader
    position = loader.state_dict() if loader is not None else {}
    description = {
        "versions": dict(_versions()),
        # The caller's dict may change before it is written.
        "config": copy.deepcopy(training.spmd_config.source),
        "mesh": dict(training.plan.mesh.axes),
        "plan": json.loads(training.plan.to_json()),
        "counters": {name: getattr(counters, name) for name in _COUNTERS},
        "data_position": {key: position[key] for key in _POSITION} if position else None,
    }
    return SaveOrder(
        folder=folder,
        tag=agreed_tag(everyones(tag), mine=tag, validation=settings.tag_validation),
        nonce=everyones(secrets.token_hex(4))[0],
        latest=latest,
        retention=Retention(last=settings.keep_last, every=settings.keep_every),
        description=description,
        process=runtime.process_index(),
        processes=runtime.process_count(),
    )
