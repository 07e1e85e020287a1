"""Whatever JSON object comes in, a config or an `SpmdZeroConfigError` comes out."""

import copy
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from spmdzero.config import SpmdZeroConfig, load_config
from spmdzero.config._keys import NO_MEANING, REMOVED
from spmdzero.config._models import SECTIONS
from spmdzero.config._off import OFF_ONLY
from spmdzero.config._params import OPTIMIZERS, SCHEDULES
from spmdzero.errors import SpmdZeroConfigError

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
    *(f"{path}.{name}" for path, model in SECTIONS.items() for name in model.model_fields),
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


def outcome(source):
    try:
        return load_config(source)
    except SpmdZeroConfigError as error:
        return str(error)


@settings(max_examples=300, deadline=None)
@given(_configs())
def test_any_object_gives_a_config_or_a_config_error_and_stays_as_it_was(source):
    before = copy.deepcopy(source)
    result = outcome(source)
    # repr, because NaN differs from itself.
    assert repr(source) == repr(before)
    if isinstance(result, SpmdZeroConfig):
        assert repr(result.source) == repr(before)


@settings(max_examples=60, deadline=None)
@given(source=_configs())
def test_a_file_and_its_dict_have_the_same_outcome(tmp_path_factory, source):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_text(json.dumps(source), encoding="utf-8")
    assert repr(outcome(path)) == repr(outcome(source))
