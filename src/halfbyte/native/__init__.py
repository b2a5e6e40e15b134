"""Compiled loops behind a plain C ABI; the package works without them, on the torch path.

`library()` is None where the library was not built, is stale, or HALFBYTE_NATIVE=0 is set.
Importing this package imports neither torch nor the compiled library.
"""

from halfbyte.native.library import NativeLibrary, describe, library

__all__ = ["NativeLibrary", "describe", "library"]
