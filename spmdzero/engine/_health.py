"""Reads what the devices have found and the user has to know."""

from spmdzero.errors import OutOfRangeError
from spmdzero.state._training import Training


def look(training: Training) -> None:
    """Reads what the devices have found since the latest look; waits for them.

    It logs the first step whose loss was not finite, unless an index is the cause.

    Raises:
        ReplicaRegionError: an integer output or buffer differs between replicas.
        OutOfRangeError: an index lay outside of what it indexes, such as a label that is no class.
    """
    step = training.health.first_bad_step()
    try:
        training.health.check_indices()
        if training.region is not None:
            training.region.check_agreement()
    except OutOfRangeError as error:
        if step is None:
            raise
        raise OutOfRangeError(f"{error}. The loss is not finite since step {step}") from None
    if step is not None:
        training.health.say_bad(step)
