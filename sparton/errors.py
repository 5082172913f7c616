"""The errors of this package that a caller may want to tell apart."""


class MissingDataError(FileNotFoundError):
    """A file of examples is not there; says what is."""


class MissingExtraError(ModuleNotFoundError):
    """A package that is an extra, or one of its own, is not installed; says how it is."""


class NonFiniteLossError(ArithmeticError):
    """The loss became NaN or infinite; nothing was saved after it did."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; says which file and what to do."""


class OtherRunError(CheckpointError):
    """The checkpoints in the folder of a run are of another run."""


class DeviceMemoryError(RuntimeError):
    """A device has no more memory."""


class RunError(RuntimeError):
    """One of the processes of a run failed.

    Attributes:
        told: whether that process has told the user why.
    """

    def __init__(self, message: str, told: bool):
        super().__init__(message)
        self.told = told
