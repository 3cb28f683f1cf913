"""The errors a user can meet: one root, and a message of three parts."""


class WholestepError(Exception):
    """The root of every error that wholestep raises on purpose."""


class SpecificationError(WholestepError, ValueError):
    """The model, the objective or an argument cannot mean what was asked. Raised before anything ran."""


class BatchError(WholestepError, ValueError):
    """The data cannot make an update. Raised before the update that would have used them."""


class NonFiniteError(WholestepError, ArithmeticError):
    """A loss or gradient was not finite. Raised before the update was applied; the weights are the last good ones.

    `update` is the number of the update that was not applied, `rows` the row numbers that made it so (empty where
    the rows were all finite and only the gradient was not).
    """

    def __init__(self, message: str, update: int, rows: tuple[int, ...] = ()):
        super().__init__(message)
        self.update = update
        self.rows = rows


class PeerError(WholestepError, RuntimeError):
    """The processes of a run do not fit together, or one of them is lost. Raised in every process that can raise."""


class CheckpointError(WholestepError, RuntimeError):
    """A checkpoint cannot be written, or is not what was written. Nothing has been changed by it."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was written. A checkpoint that failed by any other error may be good."""


def message(must: str, received: object, attempt: str) -> str:
    """Return the message of an error: what must hold, what came, what to try.

    >>> message("batch_size must be at least 1.", 0, "leave it out for 32.")
    'batch_size must be at least 1. Received: 0. Try: leave it out for 32.'
    """
    return f"{must} Received: {received}. Try: {attempt}"
