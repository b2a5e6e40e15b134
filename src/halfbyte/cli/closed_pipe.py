"""Output into a pipe whose reader has gone: `halfbyte ... | head` is no error.

A verb goes on and ends with its own exit code: what it does may be more than what it prints, and
the code of one that compares must not depend on how many lines somebody wanted to see. A program
that `halfbyte run` runs meets a closed pipe as under `python`.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from halfbyte.cli.exit_codes import EXIT_FINDINGS


class _Descriptor(io.FileIO):
    """A file descriptor that leads nowhere once nobody reads its pipe any more."""

    def write(self, data: Any, /) -> int:
        """Write bytes as `io.FileIO.write` does."""
        try:
            return super().write(data)
        except BrokenPipeError:
            _lead_nowhere(self.fileno())
            return super().write(data)


def tolerate_closed_pipes() -> None:
    """Replace sys.stdout and sys.stderr by streams that a closed pipe does not disturb."""
    sys.stdout = _make_stream(sys.__stdout__)
    sys.stderr = _make_stream(sys.__stderr__)


@contextlib.contextmanager
def plain_output() -> Iterator[None]:
    """Give sys.stdout and sys.stderr back, as the interpreter made them, for a program."""
    kept = sys.stdout, sys.stderr
    if not _is_tolerant(sys.stdout):
        yield
        return
    sys.stdout.flush()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    try:
        yield
    finally:
        for stream in (sys.__stdout__, sys.__stderr__):
            _flush(stream)
        sys.stdout, sys.stderr = kept


def end_output(code: int) -> int:
    """Write what is still held back and return the exit code: `code`, 1 if that was not possible.

    A stream that the process was started without is none that fails.
    """
    problem = _flush(sys.stdout)
    if problem is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"error: standard output: {problem.strerror or problem}", file=sys.stderr)
        code = code or EXIT_FINDINGS
    _flush(sys.stderr)
    return code


def _make_stream(plain: TextIO | None) -> Any:
    """Return a stream like `plain` that outlives its pipe; None where there is none."""
    if not isinstance(plain, io.TextIOWrapper):
        return plain
    raw = _Descriptor(plain.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if plain.write_through else io.BufferedWriter(raw),  # raw: PYTHONUNBUFFERED
        encoding=plain.encoding,
        errors=plain.errors,
        line_buffering=plain.line_buffering,
        write_through=plain.write_through,
    )


def _is_tolerant(stream: Any) -> bool:
    buffer = getattr(stream, "buffer", None)
    return isinstance(getattr(buffer, "raw", buffer), _Descriptor)


def _flush(stream: TextIO | None) -> OSError | None:
    """Return why a stream's text cannot be written; None too for a pipe that nobody reads.

    What cannot be written is dropped: the interpreter would try again at its end.
    """
    if stream is None or stream.closed:
        return None
    try:
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            _lead_nowhere(stream.fileno())
            stream.flush()
        return None if isinstance(error, BrokenPipeError) else error
    return None


def _lead_nowhere(descriptor: int) -> None:
    """Make a descriptor the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
