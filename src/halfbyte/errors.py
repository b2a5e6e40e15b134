"""Errors a user of halfbyte can meet. Each message names what came, what was wanted and the fix."""


class HalfbyteError(Exception):
    """The root of every error that halfbyte raises on purpose."""


class FormatError(HalfbyteError, ValueError):
    """A tensor, shape, dtype or setting that a number format does not allow."""


class CheckpointError(HalfbyteError, ValueError):
    """A file that is corrupt, truncated, hostile, ambiguous or of another format."""


class UnsupportedHardwareError(HalfbyteError, RuntimeError):
    """An operation for which no kernel ships for the device at hand."""


class MissingDependencyError(HalfbyteError, ImportError):
    """An optional package is absent; the message names what to install."""


class UsageError(HalfbyteError, ValueError):
    """Arguments that contradict each other or the disk; the command line exits 2 on it."""


class WorkerError(HalfbyteError, RuntimeError):
    """Worker processes that are gone, unreachable or unfit; what they finished is kept."""


class PtxError(HalfbyteError, ValueError):
    """PTX text that breaks the language, or a construct that the tools do not know.

    `line` is where in the text, from 1; 0 where no line is to blame.
    """

    def __init__(self, message: str, line: int = 0) -> None:
        """Keep the line beside the message."""
        super().__init__(message)
        self.line = line


class TensorMapError(HalfbyteError, ValueError):
    """A tensor map that no GPU accepts: the message names the field, its value and the rule."""


def printable(name: str) -> str:
    """Return `name` with control characters escaped: a hostile name must not steer a terminal."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in name
    )
