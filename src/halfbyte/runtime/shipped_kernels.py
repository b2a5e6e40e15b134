"""The kernels that halfbyte ships, by target: what `halfbyte build` compiles ahead of time.

They are the configurations that a range of calls gets, by the rules that choose them at run time;
what else is asked for is compiled when it is first used. Nothing here imports CuTe DSL: a source
makes its program only when it is compiled.
"""

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import UsageError, printable

# Rows of activations: decoding, small batches, and the token counts of image models.
_ROWS = (1, 32, 64, 256, 4352)
# (N, K, rank): the linears of image and language models that SVDQuant is used on.
_LINEARS = ((3840, 3072, 128), (3840, 15360, 128), (15360, 3840, 128), (10240, 3072, 32))
_DTYPES = ("bfloat16", "float16")


def list_shipped(target: str, kernel: str | None = None) -> list[KernelSource]:
    """Return the sources of every kernel for a target; [] where none is written for it yet.

    Args:
        target: "sm_100a", ...
        kernel: only the kernel of this name.

    Raises:
        UsageError: there is no such kernel; the message lists those there are.
    """
    if kernel is not None and kernel not in _LISTS:
        raise UsageError(f"no kernel {printable(kernel)!r}: choose from {', '.join(_LISTS)}")
    return [
        source
        for name, list_sources in _LISTS.items()
        if kernel in (None, name) and _is_present(name)
        for source in list_sources(target)
    ]


def _is_present(name: str) -> bool:
    return importlib.util.find_spec(f"halfbyte.kernels.{name}.source") is not None


def _list_quantize_act_lora(target: str) -> list[KernelSource]:
    config = importlib.import_module("halfbyte.kernels.quantize_act_lora.config")
    make_source = importlib.import_module("halfbyte.kernels.quantize_act_lora.source").make_source
    return _make_each(
        make_source,
        (
            config.choose_config(
                config.QuantizeRequest(
                    mode=mode, dtype=dtype, m=m, k=k, rank=rank, target=target, lora_dtype=dtype
                )
            )
            for mode, dtype in itertools.product(("nvfp4_nunchaku", "nvfp4_dynamic"), _DTYPES)
            for m, (_, k, rank) in itertools.product(_ROWS, _LINEARS)
        ),
    )


def _list_gemm_w4a4(target: str) -> list[KernelSource]:
    config = importlib.import_module("halfbyte.kernels.gemm_w4a4.config")
    make_source = importlib.import_module("halfbyte.kernels.gemm_w4a4.source").make_source
    if target not in config.TARGETS:
        return []
    epilogues = [
        config.EpilogueConfig(has_column_scale=True, has_alpha=has_alpha, has_bias=has_bias)
        for has_alpha, has_bias in itertools.product((False, True), repeat=2)
    ]
    return _make_each(
        make_source,
        (
            config.choose_config(
                config.GemmRequest(m, n, k, rank, "nvfp4", dtype, dtype, epilogue), target
            )
            for dtype, epilogue in itertools.product(_DTYPES, epilogues)
            for m, (n, k, rank) in itertools.product(_ROWS, _LINEARS)
        ),
    )


def _make_each(
    make_source: Callable[[Any], KernelSource], configs: Iterable[Any]
) -> list[KernelSource]:
    """Return one source for each different configuration."""
    return [make_source(config) for config in dict.fromkeys(configs)]


_LISTS: dict[str, Callable[[str], list[KernelSource]]] = {
    "quantize_act_lora": _list_quantize_act_lora,
    "gemm_w4a4": _list_gemm_w4a4,
}
KERNELS = tuple(_LISTS)
