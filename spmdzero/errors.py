"""Every error that spmdzero raises on purpose."""


class SpmdZeroError(Exception):
    """The base of every error that spmdzero raises."""


class SpmdZeroConfigError(SpmdZeroError, ValueError):
    """A config can't be honoured; the message has the key, the value, the reason and a fix.

    Attributes:
        key: dotted path of the key, e.g. ``zero_optimization.stage``.
        value: the config's value of the key.
        reason: why it can't be honoured.
        fix: the nearest thing that works.
    """

    def __init__(self, *, key: str, value: object, reason: str, fix: str) -> None:
        self.key, self.value, self.reason, self.fix = key, value, reason, fix
        super().__init__(f"{key} = {value!r}: {reason}. {fix}")


class BatchSizesError(SpmdZeroConfigError, AssertionError):
    """A `SpmdZeroConfigError` about batch sizes, which DeepSpeed checks with an `assert`."""


class UntestedOptimizerError(SpmdZeroConfigError, AssertionError):
    """A `SpmdZeroConfigError` about an optimizer that DeepSpeed refuses with an `assert`."""


class SpmdZeroUsageError(SpmdZeroError, RuntimeError):
    """A call in the wrong order, or an input of the wrong kind or size."""


class UsageAssertionError(SpmdZeroUsageError, AssertionError):
    """A `SpmdZeroUsageError` for a call that DeepSpeed refuses with an `assert`."""


class UsageValueError(SpmdZeroUsageError, ValueError):
    """A `SpmdZeroUsageError` for a call that DeepSpeed refuses with a ValueError."""


class UsageTypeError(SpmdZeroUsageError, TypeError):
    """A `SpmdZeroUsageError` for a call that DeepSpeed refuses with a TypeError."""


class UnsupportedCallError(SpmdZeroUsageError, NotImplementedError):
    """A `SpmdZeroUsageError` for a call that DeepSpeed refuses with a NotImplementedError."""


class RefusedNameError(SpmdZeroUsageError, AttributeError):
    """A use of a name of DeepSpeed that spmdzero refuses; says why, and what to use instead."""


class RefusedImportError(SpmdZeroUsageError, ModuleNotFoundError):
    """An import of a module of DeepSpeed that spmdzero refuses; says why, and what to use."""


class SpmdZeroRuntimeError(SpmdZeroError, RuntimeError):
    """The device runtime is not in the state that spmdzero needs (SPMD too late, wrong version)."""


class HostsDifferError(SpmdZeroRuntimeError):
    """Hosts that were started together differ in settings or values; every host raises it."""


class ReplicaRegionError(SpmdZeroError, RuntimeError):
    """The module did something inside the replica region that has no meaning per replica.

    Raised for a value that Python reads and the replicas disagree on, for an output that is
    neither a batch nor a scalar, and for operations whose shape depends on data.
    """


class OutOfRangeError(SpmdZeroError, IndexError):
    """An index lies outside of what it indexes, such as a label that is no class.

    The devices find it and can't stop, so it is raised when the host next asks them, after the
    steps in between.
    """


class SpmdZeroCheckpointError(SpmdZeroError, RuntimeError):
    """A checkpoint can't be written, or can't be loaded; nothing was changed.

    Attributes:
        file: the faulty file or folder.
        reason: the fault.
        newest: the newest other complete tag of the folder, by its commit and the sizes of its
            files, or None. Its tensors are checked when it is loaded.
    """

    def __init__(
        self, *, file: object, reason: str, newest: str | None = None, fix: str = ""
    ) -> None:
        self.file, self.reason, self.newest, self.fix = str(file), reason, newest, fix
        good = (
            f"The newest other complete tag is {newest!r}"
            if newest
            else "No other tag there is complete"
        )
        super().__init__(". ".join(filter(None, (f"{file}: {reason}", fix, good))))


class NonFiniteError(SpmdZeroError, FloatingPointError):
    """A loss or gradient was NaN or infinite, and the config asked to stop before the update."""


class AuditError(SpmdZeroError):
    """An audit or a diagnosis in strict mode found a problem; the message is its report."""
