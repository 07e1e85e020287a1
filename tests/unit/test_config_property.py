"""Whatever JSON object or text comes in, a config or an `SpmdZeroConfigError` comes out."""

import base64
import contextlib
import copy
import json
from pathlib import Path

import hjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmdzero.config import OPTIMIZERS, SCHEDULES, SpmdZeroConfig, load_config, resolve_batch_sizes
from spmdzero.config._keys import NO_MEANING, REMOVED
from spmdzero.config._models import SECTIONS
from spmdzero.config._must_be_off import OFF_ONLY
from spmdzero.errors import SpmdZeroConfigError

pytestmark = pytest.mark.backends("any")

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2, 3, 2**70, 10**400])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["auto", "Adam", "SGD", "WarmupLR", "StepLR", "bf16", "none", "cpu"])
)
_PATHS = {
    *NO_MEANING,
    *REMOVED,
    *OFF_ONLY,
    *(f"{path}.{name}" for path, model in SECTIONS.items() for name in model.json_keys()),
    *(f"optimizer.params.{name}" for model in OPTIMIZERS.values() for name in model.model_fields),
    *(f"scheduler.params.{name}" for model in SCHEDULES.values() for name in model.model_fields),
    "optimizer.params.max_grad_norm",
}
# Only names that mean something reach the deeper checks; random text alone is always unknown.
_NAMES = st.sampled_from(sorted({part for path in _PATHS for part in path.split(".") if part}))
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_NAMES | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def _configs(draw):
    config = draw(st.dictionaries(st.text(max_size=5), _VALUES, max_size=1))
    for path in draw(st.lists(st.sampled_from(sorted(_PATHS)), max_size=4)):
        *sections, name = filter(None, path.split("."))
        holder = config
        for section in sections:
            holder = holder.setdefault(section, {})
            if not isinstance(holder, dict):
                break
        else:
            holder[name] = draw(_VALUES)
    return config


_FILES = [
    hjson.loads(path.read_text())
    for path in sorted((Path(__file__).parents[1] / "data" / "configs").iterdir())
]


def _places(config, at=()):
    for name, value in config.items():
        yield (*at, name)
        if isinstance(value, dict):
            yield from _places(value, (*at, name))


@st.composite
def _mutated_files(draw):
    """A real config with keys dropped, renamed, or given another value."""
    config = copy.deepcopy(draw(st.sampled_from(_FILES)))
    for _ in range(draw(st.integers(1, 3))):
        places = sorted(_places(config))
        if not places:
            break
        *sections, name = draw(st.sampled_from(places))
        holder = config
        for section in sections:
            holder = holder[section]
        value = holder.pop(name)
        change = draw(st.sampled_from(["drop", "rename", "replace", "auto"]))
        if change == "rename":
            holder[draw(_NAMES)] = value
        elif change == "replace":
            holder[name] = draw(_VALUES)
        elif change == "auto":
            holder[name] = "auto"
    return config


@st.composite
def _texts(draw):
    """The text of a config, with a few characters changed or the end cut off."""
    config = draw(_mutated_files() | _configs())
    write = draw(st.sampled_from([json.dumps, hjson.dumps]))
    # Python writes no integer of more than 4300 digits; 10**400 has fewer.
    text = write(config)
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(text)))
        inserted = draw(st.text(max_size=2) | st.sampled_from(list("{}[]:,'\"#/*\\\n")))
        text = text[:place] + inserted + text[place + draw(st.integers(0, 2)) :]
    return text if draw(st.booleans()) else text[: draw(st.integers(0, len(text)))]


def outcome(source):
    try:
        config = load_config(source)
    except SpmdZeroConfigError as error:
        return str(error)
    with contextlib.suppress(SpmdZeroConfigError):
        resolve_batch_sizes(config, dp_world_size=8)
    return config


def cases(few, many):
    """How many are drawn, and slowly: together 12,000, about a minute on 2 cores."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


def drawn(count, strategy, check):
    """Runs a check on drawn values."""
    every = list(HealthCheck)
    settings(max_examples=count, deadline=None, suppress_health_check=every)(
        given(strategy)(check)
    )()


@cases(150, 5000)
@pytest.mark.parametrize("strategy", [_configs(), _mutated_files()], ids=["object", "file"])
def test_any_object_gives_a_config_or_a_config_error_and_stays_as_it_was(strategy, count):
    def check(source):
        before = copy.deepcopy(source)
        result = outcome(source)
        # repr, because NaN differs from itself.
        assert repr(source) == repr(before)
        if isinstance(result, SpmdZeroConfig):
            assert repr(result.source) == repr(before)

    drawn(count, strategy, check)


def test_a_file_and_its_dict_have_the_same_outcome(tmp_path):
    path = tmp_path / "fuzz.json"

    def check(source):
        path.write_text(json.dumps(source), encoding="utf-8")
        assert repr(outcome(path)) == repr(outcome(source))

    drawn(60, _configs(), check)


@cases(100, 3000)
def test_any_text_gives_a_config_or_a_config_error(tmp_path, count):
    path = tmp_path / "fuzz_text.json"

    def check(source):
        text, encoded = source
        data = text.encode("utf-8", "replace")
        if encoded:
            outcome(base64.urlsafe_b64encode(data).decode())
        else:
            path.write_bytes(data)
            outcome(path)

    drawn(count, st.tuples(_texts(), st.booleans()), check)


def test_anything_else_gives_a_config_error():
    def check(source):
        assert isinstance(outcome(source), str)

    drawn(100, st.text() | st.binary() | _SCALARS | st.lists(_VALUES), check)
