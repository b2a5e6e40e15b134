"""What a kernel is before it is compiled: a name, a configuration, and how to make its program."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelSource:
    """One kernel, complete: equal sources compile to the same program.

    Attributes:
        name: the operation, e.g. "gemm_w4a4".
        config: a frozen record of all compile-time choices; its repr is stable and complete.
        target: the PTX target, e.g. "sm_100a".
        modules: full names of the modules whose text decides what is compiled.
        make: imports CuTe and returns the host function (a `cute.jit` callable) and the arguments
            that stand for its real ones in `cute.compile`.
    """

    name: str
    config: Any
    target: str
    modules: tuple[str, ...]
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]

    def __str__(self) -> str:
        """Return the kernel in one line."""
        return f"{self.name} for {self.target}: {self.config}"
