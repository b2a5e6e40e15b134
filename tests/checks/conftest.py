"""A virtual B200 for the checks of compiled kernels, and those kernels, each compiled once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfbyte.kernels.gemm_w4a4.config import GemmConfig
from tests.checks.compiled_gemm import CompiledGemm, compile_gemm
from tests.kernels.conftest import b200

__all__ = ["b200"]

CompileGemm = Callable[[GemmConfig], CompiledGemm]


@pytest.fixture(scope="module")
def compile_once(b200: Any, tmp_path_factory: pytest.TempPathFactory) -> CompileGemm:
    """Return a function that compiles and launches a GEMM once on the virtual B200."""
    compiled: dict[GemmConfig, CompiledGemm] = {}

    def compile_config(config: GemmConfig) -> CompiledGemm:
        if config not in compiled:
            folder: Path = tmp_path_factory.mktemp("gemm")
            compiled[config] = compile_gemm(b200, config, folder)
        return compiled[config]

    return compile_config
