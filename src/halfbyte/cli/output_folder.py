"""Whether results can be written into a folder, told before the work that makes them."""

import os
from pathlib import Path

from halfbyte.errors import UsageError, printable


def check_output_folder(option: str, folder: Path) -> None:
    """Raise UsageError unless files can be put into `folder`, which may have to be made.

    Args:
        option: that names it, for the message.
        folder: a directory, or a place inside one for a directory.
    """
    name = f"{option} {printable(str(folder))}"
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise UsageError(f"{name}: {printable(str(nearest))} is no directory; name another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{name}: {printable(str(nearest))} may not be written; name another")
