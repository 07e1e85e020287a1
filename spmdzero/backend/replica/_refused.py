"""The error about blocks that can't become a loop."""


class NotALoopError(Exception):
    """A block can't be the body of a loop; the text is a clause that says why."""
