"""The error about Python that may do something else when it runs again."""


class ImpureError(Exception):
    """A run of the user's Python can't stand for later ones; the text is a clause that says why."""
