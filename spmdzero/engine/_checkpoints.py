"""Checkpoints by DeepSpeed's method names."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdzero.backend.torch_xla import runtime
from spmdzero.engine._accumulation import Accumulation
from spmdzero.errors import SpmdZeroCheckpointError, SpmdZeroUsageError
from spmdzero.formats import (
    BackgroundSaver,
    Box,
    Retention,
    SaveOrder,
    TrainingState,
    check_tag,
    held_for,
    latest_tag,
    newest_complete,
    save_native,
)
from spmdzero.state._from_deepspeed import open_for
from spmdzero.state._live import live_state
from spmdzero.state._match import LoadReport
from spmdzero.state._restore import LoadOptions, restore
from spmdzero.state._together import everyones, together
from spmdzero.state._training import Training

logger = logging.getLogger("spmdzero")

_VERSIONS = ("spmdzero", "torch", "torch_xla")


class Checkpoints:
    """Saves and loads the state of `training`.

    Attributes:
        load_report: what the latest non-strict load left as it was.
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
        """Saves everything that training needs to go on exactly as if it had not stopped.

        Every process calls it. What was in `save_dir` before stays good until the new checkpoint
        is complete. With ``"checkpoint": {"async": true}`` it returns as soon as the state is in
        the host's memory, and files are written while training goes on.

        Args:
            save_dir: folder of all checkpoints of a run, seen by all hosts.
            tag: the checkpoint's own folder in it; ``global_step<n>`` by default.
            client_state: the caller's own, returned by `load_checkpoint`: numbers, strings,
                tensors, and dicts, lists and tuples of them.
            save_latest: let the file `latest` name it.
            exclude_frozen_parameters: leave out parameters that don't require gradients.

        Returns True.

        Raises:
            SpmdZeroCheckpointError: it can't be saved, or the asynchronous save before failed;
                on whichever host that was.
            SpmdZeroUsageError: between backward and step, no folder, a tag that is no name of
                one, or a client state that can't be read back safely.
            ReplicaRegionError: an integer output or buffer differs between replicas.
        """
        training = self._training
        self._accumulation.refuse_inside("save_checkpoint")
        if training.region is not None and training.region.disagreements:
            # What an evaluation left pending is compiled as a whole, not for its flags alone.
            runtime.sync()
            training.region.check_agreement()
        if not save_dir:
            raise SpmdZeroUsageError(f"save_dir must be a non-empty string, got {save_dir!r}")
        settings, processes = training.spmd_config.checkpoint, runtime.process_count()
        with together(Path(save_dir), doing="saved", processes=processes):
            self.wait_checkpoint()
            state = live_state(
                training, exclude_frozen=exclude_frozen_parameters, client_state=client_state
            )
            tag = check_tag(
                f"global_step{training.counters.global_steps}" if tag is None else str(tag)
            )
        tags = everyones(tag, processes=processes)
        order = SaveOrder(
            folder=Path(save_dir),
            tag=agreed_tag(tags, mine=tag, validation=settings.tag_validation),
            nonce=everyones(secrets.token_hex(4), processes=processes)[0],
            latest=save_latest,
            retention=Retention(last=settings.keep_last, every=settings.keep_every),
            description=_description(training),
            process=runtime.process_index(),
            processes=processes,
        )
        if settings.asynchronous:
            self._saver.start(functools.partial(save_native, held_for(order, state), order))
        else:
            save_native(state, order)
        return True

    def wait_checkpoint(self) -> None:
        """Waits until the asynchronous save under way is complete.

        Raises:
            SpmdZeroCheckpointError: it failed; the checkpoints before are as they were.
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
        """Takes over a checkpoint, saved on whatever number of devices and at whatever ZeRO stage.

        Everything is checked before anything changes.

        Args:
            load_dir: folder of the checkpoints.
            tag: which of them; what the file `latest` says by default. Those that DeepSpeed wrote
                under ZeRO-1/2 or at stage 0 are recognised, regular and universal.
            load_module_strict: parameters and buffers must be those of the module; otherwise
                those that both have are loaded, and `load_report` tells which they don't.
            load_optimizer_states: otherwise masters are made of the loaded parameters, and
                everything else of the optimizer stays.
            load_lr_scheduler_states: otherwise the schedule stays.
            load_module_only: load parameters and buffers, nothing else.
            custom_load_fn: called as ``custom_load_fn(src=state_dict, dst=module)`` to load the
                module; `src` is whole, on the CPU.

        Returns the checkpoint's path and its client state; None and None when `tag` is not given
        and nothing was saved yet.

        Raises:
            SpmdZeroCheckpointError: damaged, incomplete or of another model or format; says which
                file, why, and the newest other tag that is complete. The engine is as it was, on
                every host.
        """
        training, folder, processes = self._training, Path(load_dir), runtime.process_count()
        with _naming_the_newest(folder, but=None):
            with together(folder, doing="loaded", processes=processes):
                self.wait_checkpoint()
                if tag is None:
                    tag = latest_tag(
                        folder, universal=training.spmd_config.checkpoint.load_universal
                    )
            require_one_tag(folder, everyones(tag, processes=processes))
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
        with _naming_the_newest(folder, but=str(tag)):
            alike = functools.partial(
                together, folder / str(tag), doing="loaded", processes=processes
            )
            with alike():
                state = open_for(training, folder, str(tag))
            self.load_report = restore(training, _checked(state, alike), options)
        for what in ("missing", "unexpected"):
            if names := getattr(self.load_report, what):
                logger.warning("loaded %s: %s %s", folder / str(tag), what, ", ".join(names))
        return state.source, dict(state.host.client_state)


@contextlib.contextmanager
def _naming_the_newest(folder: Path, *, but: str | None) -> Iterator[None]:
    try:
        yield
    except SpmdZeroCheckpointError as error:
        if error.newest is not None:
            raise
        raise SpmdZeroCheckpointError(
            file=error.file,
            reason=error.reason,
            newest=newest_complete(folder, but=but),
            fix=error.fix,
        ) from error


def _checked(
    state: TrainingState, alike: Callable[[], contextlib.AbstractContextManager[None]]
) -> TrainingState:
    """The same state, whose damage one host's files show and every host is told of."""

    def check(parts: Mapping[str, Iterable[Box]]) -> None:
        with alike():
            state.check(parts)

    return dataclasses.replace(state, check=check)


def require_one_tag(folder: Path, tags: list[str | None]) -> None:
    """Returns if all processes are about to load the same, or nothing.

    Otherwise some would train from another state, or wait for those that found nothing to load.

    Args:
        folder: of the checkpoints.
        tags: those that the processes named, or found in `latest`; None for no such file.

    Raises:
        SpmdZeroCheckpointError: they differ.
    """
    if len(set(tags)) > 1:
        raise SpmdZeroCheckpointError(
            file=folder,
            reason=f"the processes would load the tags {tags}, None where there is no latest",
            newest=None,
            fix="Name the same tag in every process, in a folder that all of them see",
        )


def agreed_tag(tags: list[str], *, mine: str, validation: str) -> str:
    """The first process's tag, which all use.

    Args:
        tags: those that the processes named.
        mine: this process's.
        validation: ``"FAIL"`` to raise in every process when they differ, ``"WARN"`` to say so
            in those that named another, ``"IGNORE"``.

    Raises:
        SpmdZeroUsageError: they differ and must not.
    """
    if validation == "FAIL" and len(set(tags)) > 1:
        raise SpmdZeroUsageError(
            f'the processes save the tags {tags}, and "tag_validation" is "FAIL": name the same '
            "tag in every process"
        )
    if validation == "WARN" and mine != tags[0]:
        logger.warning(
            "this process saves the tag %r, the first one %r, which is used", mine, tags[0]
        )
    return tags[0]


def _description(training: Training) -> dict[str, Any]:
    return {
        "versions": {name: importlib.metadata.version(name) for name in _VERSIONS},
        "config": training.spmd_config.source,
        "mesh": dict(training.plan.mesh.axes),
        "plan": json.loads(training.plan.to_json()),
        "counters": {
            name: getattr(training.counters, name)
            for name in ("global_steps", "micro_steps", "global_samples")
        },
        "data_position": _position(training),
    }


def _position(training: Training) -> dict[str, int] | None:
    if training.training_dataloader is None:
        return None
    state = training.training_dataloader.state_dict()
    return {key: state[key] for key in ("epoch", "rows", "handed_out", "finished")}
