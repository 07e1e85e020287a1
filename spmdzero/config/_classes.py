"""What becomes of a key: the one class that it is in."""

from typing import Literal

from spmdzero.config._deprecated import DEPRECATED, SECOND_SPELLINGS
from spmdzero.config._keys import NO_MEANING, REMOVED
from spmdzero.config._models import SECTIONS
from spmdzero.config._off import OFF_ONLY

KeyClass = Literal["honoured", "no meaning", "refused"]


def key_class(key: str) -> KeyClass | None:
    """The class of a key by its dotted name; None for a key that spmdzero doesn't know.

    "refused" keys are accepted while they ask for nothing. A key inside a section that is in one
    class as a whole is in the section's.
    """
    key = {**DEPRECATED, **SECOND_SPELLINGS}.get(key, key)
    if key in NO_MEANING:
        return "no meaning"
    if key in OFF_ONLY or key in REMOVED:
        return "refused"
    section, _, name = key.rpartition(".")
    if section in SECTIONS and name in SECTIONS[section].json_keys():
        return "honoured"
    # The fields of a model are all it has; what is in a refused section is refused with it.
    return key_class(section) if section and section not in SECTIONS else None
