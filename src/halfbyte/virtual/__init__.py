"""The virtual GPU: runs the PTX of unmodified programs on a CPU.

    device = Device("b200")
    report = device.load(ptx).launch("kernel", grid=(2, 1, 1), block=(128, 1, 1), arguments=[x, 7])

`cuda("b200")` runs whole CuTe DSL and torch programs. Importing this package loads neither torch
nor the compiled core.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.virtual.device import Device, LaunchOptions
    from halfbyte.virtual.driver.session import cuda

__all__ = ["Device", "LaunchOptions", "cuda"]


def __getattr__(name: str) -> Any:
    if name == "cuda":
        from halfbyte.virtual.driver import session

        return session.cuda
    if name in __all__:
        from halfbyte.virtual import device

        return getattr(device, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
