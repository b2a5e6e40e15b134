"""The peak memory of this process."""

import resource
import sys


def read_peak_memory_bytes() -> int:
    """Return the largest resident set of this process so far, in bytes (getrusage)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
