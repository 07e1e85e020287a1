"""Why blocks stay what they are."""


class NotALoopError(Exception):
    """A block can't be the body of a loop; the text says why, and is a clause."""
