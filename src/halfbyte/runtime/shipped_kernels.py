"""The kernels that halfbyte ships, by target: what `halfbyte build` compiles ahead of time.

A package of `halfbyte.kernels` takes part with `config.py: list_shipped_configs(target)`, which
names the configurations worth compiling ahead of time, and `source.py: make_source(config)`.
"""

import importlib
import importlib.util

from halfbyte.device.kernel_source import KernelSource

KERNELS = ("quantize_act_lora", "gemm_w4a4")


def list_shipped(target: str) -> list[KernelSource]:
    """Return the sources of every kernel for a target; [] where none is written for it yet.

    No CuTe DSL is imported: a source makes its program only when it is compiled.
    """
    sources: list[KernelSource] = []
    for name in KERNELS:
        package = f"halfbyte.kernels.{name}"
        if importlib.util.find_spec(f"{package}.source") is None:
            continue
        list_configs = getattr(
            importlib.import_module(f"{package}.config"), "list_shipped_configs", None
        )
        make_source = importlib.import_module(f"{package}.source").make_source
        sources += [
            make_source(config) for config in (list_configs(target) if list_configs else [])
        ]
    return sources
