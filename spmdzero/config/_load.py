"""Loads a checked config from a file, a dict or the command line's arguments."""

import copy
import os
from typing import Any

from spmdzero.config._auto import resolve_auto
from spmdzero.config._combinations import check_combinations
from spmdzero.config._contexts import without_effect_beside
from spmdzero.config._deprecated import holder_of, modernise
from spmdzero.config._errors import parse
from spmdzero.config._ignored import ignore_unknown, known_names
from spmdzero.config._keys import NO_MEANING
from spmdzero.config._models import SECTIONS, SpmdZeroConfig
from spmdzero.config._optimizers import optimizer_params
from spmdzero.config._params import check_params
from spmdzero.config._read import named_by, one_of, read
from spmdzero.config._schedules import schedule_params
from spmdzero.config._screen import screen
from spmdzero.config._values import check_values


def load_config(
    config: str | os.PathLike[str] | dict[str, Any] | None, *, args: object = None
) -> SpmdZeroConfig:
    """Reads and checks a config.

    Args:
        config: path of a JSON or Hjson file, the base64 encoding of its text, or its content as
            a dict, which is not changed; None takes ``args.deepspeed_config``.
        args: the parsed command line, for example an argparse.Namespace.

    Raises:
        SpmdZeroConfigError: there is no config or more than one, the file can't be read, or a key
            can't be honoured. A key that DeepSpeed doesn't know and so ignores is ignored too, and
            logged.
    """
    given = read(one_of(config, named_by(args)))
    check_values(given)
    source, raw = copy.deepcopy(given), copy.deepcopy(given)
    modernise(raw)
    ignore_unknown(raw)
    modern = copy.deepcopy(raw)
    resolve_auto(raw)
    screen(raw)
    known = {at: known_names(at) for at in SECTIONS}
    checked = parse(SpmdZeroConfig, raw, known=known, at="")
    if chosen := checked.optimizer:
        check_params(optimizer_params(chosen.type), chosen.params, at="optimizer.params")
    if scheduled := checked.scheduler:
        check_params(schedule_params(scheduled.type), scheduled.params, at="scheduler.params")
    check_combinations(checked)
    checked._source = source
    checked._no_meaning = {
        key: why
        for key, why in (NO_MEANING | without_effect_beside(checked)).items()
        if holder_of(modern, key)[0] is not None
    }
    return checked
