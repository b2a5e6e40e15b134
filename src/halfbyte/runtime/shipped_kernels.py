"""The kernels that halfbyte ships, by target: what `halfbyte build` compiles ahead of time.

They are the configurations that a range of calls gets, by the rules that choose them at run time;
what else is asked for is compiled when it is first used. Nothing here imports CuTe DSL: a source
makes its program only when it is compiled.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal

from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import UsageError, printable
from halfbyte.kernels.gemm_w4_wgmma import choose as choose_wgmma
from halfbyte.kernels.gemm_w4_wgmma import config as wgmma
from halfbyte.kernels.gemm_w4_wgmma import source as wgmma_source
from halfbyte.kernels.gemm_w4a4 import choose, config
from halfbyte.kernels.gemm_w4a4 import source as gemm_source
from halfbyte.kernels.quantize_act_lora import config as quantize
from halfbyte.kernels.quantize_act_lora import source as quantize_source
from halfbyte.kernels.quantize_act_wgmma import config as quantize_wgmma
from halfbyte.kernels.quantize_act_wgmma import source as quantize_wgmma_source

# Rows of activations: decoding, small batches, and the token counts of image models.
_ROWS = (1, 32, 64, 256, 4352)
# (N, K, rank): the linears of image and language models that SVDQuant is used on.
_LINEARS = ((3072, 3840, 128), (15360, 3840, 128), (3840, 15360, 128), (3072, 10240, 32))
# What Hopper runs NVFP4 weights in: the mode of the product, and that of the quantizer before it.
_HOPPER_MODES: tuple[tuple[Literal["fp8", "exact"], str], ...] = (
    ("fp8", "fp8"),
    ("exact", "nvfp4_nunchaku"),
    ("exact", "nvfp4_dynamic"),
)
_DTYPES: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")


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
        if kernel in (None, name)
        for source in list_sources(target)
    ]


def _list_quantize_act_lora(target: str) -> list[KernelSource]:
    return _make_each(
        quantize_source.make_source,
        (
            quantize.choose_config(
                quantize.QuantizeRequest(
                    mode=mode, dtype=dtype, m=m, k=k, rank=rank, target=target, lora_dtype=dtype
                )
            )
            for mode, dtype in itertools.product(("nvfp4_nunchaku", "nvfp4_dynamic"), _DTYPES)
            for m, (_, k, rank) in itertools.product(_ROWS, _LINEARS)
        ),
    )


def _list_gemm_w4a4(target: str) -> list[KernelSource]:
    if target not in config.TARGETS:
        return []
    epilogues = [
        config.EpilogueConfig(has_column_scale=True, has_alpha=has_alpha, has_bias=has_bias)
        for has_alpha, has_bias in itertools.product((False, True), repeat=2)
    ]
    return _make_each(
        gemm_source.make_source,
        (
            choose.choose_config(
                choose.GemmRequest(m, n, k, rank, "nvfp4", dtype, dtype, epilogue), target
            )
            for dtype, epilogue in itertools.product(_DTYPES, epilogues)
            for m, (n, k, rank) in itertools.product(_ROWS, _LINEARS)
        ),
    )


def _list_quantize_act_wgmma(target: str) -> list[KernelSource]:
    if target != quantize_wgmma.TARGET:
        return []
    return _make_each(
        quantize_wgmma_source.make_source,
        (
            quantize_wgmma.choose_config(
                quantize_wgmma.WgmmaQuantizeRequest(mode, dtype, m, k, rank, use_pdl=True)
            )
            for (_, mode), dtype in itertools.product(_HOPPER_MODES, _DTYPES)
            for m, (_, k, rank) in itertools.product(_ROWS, _LINEARS)
        ),
    )


def _list_gemm_w4_wgmma(target: str) -> list[KernelSource]:
    if target != wgmma.TARGET:
        return []
    return _make_each(
        wgmma_source.make_source,
        (
            choose_wgmma.choose_config(
                wgmma.WgmmaGemmRequest(
                    m, n, k, rank, mode, "e2m1", dtype, dtype,
                    has_bias=has_bias, has_alpha=activation == "nvfp4_dynamic", use_pdl=True,
                )
            )
            for (mode, activation), dtype in itertools.product(_HOPPER_MODES, _DTYPES)
            for has_bias in (False, True)
            for m, (n, k, rank) in itertools.product(_ROWS, _LINEARS)
        ),
    )  # fmt: skip


def _make_each(
    make_source: Callable[[Any], KernelSource], configs: Iterable[Any]
) -> list[KernelSource]:
    """Return one source for each different configuration."""
    return [make_source(config) for config in dict.fromkeys(configs)]


_LISTS: dict[str, Callable[[str], list[KernelSource]]] = {
    "quantize_act_lora": _list_quantize_act_lora,
    "gemm_w4a4": _list_gemm_w4a4,
    "quantize_act_wgmma": _list_quantize_act_wgmma,
    "gemm_w4_wgmma": _list_gemm_w4_wgmma,
}
KERNELS = tuple(_LISTS)
# What a 4-bit linear takes, a quantizer and a product; a target has one of these.
LINEARS = (("quantize_act_lora", "gemm_w4a4"), ("quantize_act_wgmma", "gemm_w4_wgmma"))
