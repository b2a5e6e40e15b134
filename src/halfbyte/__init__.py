"""Real models in 4 bits: quantize them with SVDQuant and run them on a plain CPU.

Importing this package imports neither torch, CuTe nor CUDA: names are resolved on first use,
so that `import halfbyte` stays light and the CPU half works on a plain machine.
"""

from importlib import import_module
from typing import Any

from halfbyte.version import __version__

_LAZY_SUBMODULES = ("cpu", "errors", "formats", "nn", "ops", "reference", "svdquant")

_LAZY_NAMES = {"load": "halfbyte.nn.load_checkpoint"}

__all__ = ["__version__", *_LAZY_NAMES, *_LAZY_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _LAZY_SUBMODULES:
        return import_module(f"halfbyte.{name}")
    if name in _LAZY_NAMES:
        return getattr(import_module(_LAZY_NAMES[name]), name)
    raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
