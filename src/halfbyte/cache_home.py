"""Where caches of this user go, also in a container that gives the user no home."""

import os
import tempfile
from pathlib import Path


def find_cache_home() -> Path:
    """Return XDG_CACHE_HOME, else ~/.cache; without a home a folder among the temporary files.

    An XDG_CACHE_HOME that is no full path is ignored, as the XDG base directory specification says.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        return Path.home().absolute() / ".cache"
    except RuntimeError:
        user = os.getuid() if hasattr(os, "getuid") else "user"
        return Path(tempfile.gettempdir()) / f"halfbyte-cache-{user}"
