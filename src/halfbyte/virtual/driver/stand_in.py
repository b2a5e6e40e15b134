"""Finds and loads the compiled stand-in for the CUDA runtime and connects it to Python."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from halfbyte.errors import MissingDependencyError

LIBRARY_PATH = Path(__file__).with_name("_cuda_runtime_stand_in.so")

# (name of the call, its words, how many) -> CUDA error code
_HOOK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int32
)


def find_library() -> Path:
    """Return the file of the stand-in; HALFBYTE_CUDA_STAND_IN names another one.

    Raises:
        MissingDependencyError: it was not built.
    """
    path = Path(os.environ.get("HALFBYTE_CUDA_STAND_IN") or LIBRARY_PATH)
    if not path.exists():
        raise MissingDependencyError(
            f"the stand-in for the CUDA runtime is not built ({path} is missing); install a C++17 "
            "compiler (Debian: apt install g++) and reinstall halfbyte"
        )
    return path.resolve()


class StandIn:
    """The loaded library; its calls go to one Python function until `close`."""

    def __init__(self, call: Callable[[str, list[int]], int]) -> None:
        """Load the library and let `call(name, words)` answer with a CUDA error code.

        Raises:
            MissingDependencyError: the library was not built.
        """
        self.path = find_library()
        try:  # global: exported .so files find its symbols
            self._library = ctypes.CDLL(str(self.path), mode=ctypes.RTLD_GLOBAL)
            set_hook = self._library.halfbyte_set_hook
        except (OSError, AttributeError) as error:
            raise MissingDependencyError(
                f"{self.path} is no stand-in for the CUDA runtime: {error}"
            ) from None

        def forward(name: bytes, words: "ctypes._Pointer[ctypes.c_uint64]", count: int) -> int:
            return call(name.decode(), words[:count])

        self._hook = _HOOK(forward)  # kept: the library holds its address
        set_hook(self._hook)

    def set_error(self, kind: str, text: str) -> None:
        """Set the error that the next failing call through TVM FFI raises."""
        self._library.halfbyte_set_error(kind.encode(), text.encode())

    def close(self) -> None:
        """Disconnect: later calls answer "not supported"."""
        self._library.halfbyte_set_hook(_HOOK())
