"""What makes `cute.compile(...)` and its compiled functions run without GPU and driver.

The compiler runs as it is, with its target set by environment variables. Four things differ: it is
made to write its PTX, which goes into the kernel image; errors of a launch are raised as they were
stored; the occupancy query needs no driver; a benchmark runs its function once.
"""

import functools
import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfbyte.virtual.driver.benchmarks import measure_once_ms
from halfbyte.virtual.driver.images import FAT_BINARY_MAGIC, add_ptx
from halfbyte.virtual.driver.patching import Patches
from halfbyte.virtual.driver.runtime import VirtualRuntime
from halfbyte.virtual.occupancy import count_resident_clusters

_IMAGE_START = FAT_BINARY_MAGIC.to_bytes(4, "little")
_DUMP_OPTION = "dump-ptx-path"


def make_environment(target: str, library: Path, cache: Path) -> dict[str, str]:
    """Return the environment variables that CuTe DSL and its peers read.

    Compiled code of other sessions may lack its PTX, so that caches on disk are off or our own.
    """
    return {
        "CUTE_DSL_ARCH": target,
        "CUTE_DSL_LIBS": str(library),
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "QUACK_CACHE_DIR": str(cache / "quack"),
    }


def is_installed() -> bool:
    """Whether CuTe DSL can be imported."""
    return importlib.util.find_spec("cutlass") is not None and _has_package("nvidia_cutlass_dsl")


def _has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def patch_cute_dsl(
    patches: Patches, runtime: VirtualRuntime, set_error: Callable[[str, str], None]
) -> None:
    """Patch CuTe DSL, where it is installed; the environment must be set before."""
    if not is_installed():
        return
    compiler = importlib.import_module("cutlass.base_dsl.compiler")
    patches.set(compiler.Compiler, "compile", _keep_ptx(compiler.Compiler.compile))
    _patch_environment_managers(patches, runtime)
    executor = importlib.import_module("cutlass.base_dsl.jit_executor").JitExecutor
    patches.set(
        executor, "run_compiled_program", _raise_faults(executor.run_compiled_program, runtime)
    )
    hardware = importlib.import_module("cutlass.utils.hardware_info").HardwareInfo
    patches.set(hardware, "get_max_active_clusters", _make_cluster_query(runtime))
    _patch_testing(patches, runtime)
    register_error(runtime)


def _patch_environment_managers(patches: Patches, runtime: VirtualRuntime) -> None:
    """Set the target where CuTe DSL was imported, and its environment read, before the session."""
    manager = importlib.import_module("cutlass.cutlass_dsl").CuTeDSL._get_dsl().envar
    if manager.arch != runtime.gpu.target:
        patches.set(manager, "arch", runtime.gpu.target)


def _keep_ptx(compile_module: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Compiler.compile` putting the PTX into every kernel image it makes."""

    @functools.wraps(compile_module)
    def compile_and_keep(self: Any, module: Any, pipeline: str, *rest: Any, **options: Any) -> Any:
        end = pipeline.rfind("}")
        with tempfile.TemporaryDirectory(prefix="halfbyte-ptx-") as folder:
            if end < 0 or "cubin-format" not in pipeline:
                return compile_module(self, module, pipeline, *rest, **options)
            folders = [Path(folder)]
            if _DUMP_OPTION in pipeline:
                dumped = pipeline.split(_DUMP_OPTION + "=")[1].strip("'\" ")
                prefix = Path(dumped.split("'")[0].split()[0])
            else:
                prefix = folders[0] / "kernel"
                pipeline = f"{pipeline[:end]} {_DUMP_OPTION}='{prefix}'{pipeline[end:]}"
            compiled = compile_module(self, module, pipeline, *rest, **options)
            texts = [path.read_text() for path in sorted(prefix.parent.glob(prefix.name + ".*ptx"))]
            if texts:
                _add_ptx_to_images(compiled if compiled is not None else module, texts)
            return compiled

    return compile_and_keep


def _add_ptx_to_images(module: Any, texts: list[str]) -> None:
    """Rewrite every kernel image among the module's constants; one PTX file belongs to all."""
    change_images(module, lambda image: add_ptx(image, _choose_ptx(image, texts)))


def change_images(module: Any, change: Callable[[bytes], bytes]) -> None:
    """Replace every kernel image among the constants of a compiled MLIR module."""
    ir = importlib.import_module("cutlass._mlir.ir")
    for operation in module.body.operations:
        attributes = operation.operation.attributes
        if operation.operation.name != "llvm.mlir.global" or "value" not in attributes:
            continue
        value = getattr(attributes["value"], "value_bytes", b"")
        if not value.startswith(_IMAGE_START):
            continue
        image = change(value)
        with module.context, operation.operation.location:
            attributes["value"] = ir.StringAttr.get(image)
            kind = ir.Type.parse(f"!llvm.array<{len(image)} x i8>")
            attributes["global_type"] = ir.TypeAttr.get(kind)


def _choose_ptx(image: bytes, texts: list[str]) -> str:
    """Return the text whose kernels the image names; with one text there is no choice."""

    def count(text: str) -> int:
        names = [
            line.split(".entry ")[1].split("(")[0]
            for line in text.splitlines()
            if ".entry " in line
        ]
        return sum(name.encode() in image for name in names)

    return max(texts, key=count)


def _raise_faults(run: Callable[..., Any], runtime: VirtualRuntime) -> Callable[..., Any]:
    """Return `run` raising the stored fault in place of the runtime's error code."""

    @functools.wraps(run)
    def run_and_raise(*arguments: Any, **keywords: Any) -> Any:
        try:
            result = run(*arguments, **keywords)
        except Exception as error:
            fault = runtime.take_fault()
            if fault is None:
                raise
            raise fault from (None if fault.__cause__ is None else error)
        fault = runtime.take_fault()
        if fault is not None:  # the compiled code did not look at the error code
            raise fault
        return result

    return run_and_raise


ERROR_KIND = "HalfbyteVirtualGpuFault"


def register_error(runtime: VirtualRuntime) -> None:
    """Let TVM FFI raise the stored fault for an error of `ERROR_KIND`, where it is installed."""
    if not _has_package("tvm_ffi"):
        return
    register = importlib.import_module("tvm_ffi").register_error

    class StoredError(RuntimeError):
        """Makes the exception that waits in the runtime: TVM FFI wants a class for each kind."""

        def __new__(cls, message: str) -> Any:
            return runtime.take_fault() or RuntimeError(message)

    register(ERROR_KIND, StoredError)


def _make_cluster_query(runtime: VirtualRuntime) -> Callable[..., int]:
    def get_max_active_clusters(self: Any, cluster_size: int, stream: Any = None) -> int:
        """Return the clusters resident at once, one block per multiprocessor."""
        if not 0 < cluster_size <= 32:
            raise ValueError(f"Cluster size must be between 1 and 32, {cluster_size} is not")
        return count_resident_clusters(runtime.gpu, cluster_size, 1)

    return get_max_active_clusters


def _patch_testing(patches: Patches, runtime: VirtualRuntime) -> None:
    def benchmark_once(callable: Callable[..., Any], *arguments: Any, **options: Any) -> float:
        for name in ("warmup_iterations", "iterations", "use_cold_l2", "print_verbose"):
            options.pop(name, None)
        options.pop("current_stream", None)
        return measure_once_ms(runtime, lambda: callable(*arguments, **options)) * 1e3

    for name in ("cutlass.testing", "cutlass.cute.testing"):
        replacements = {
            "benchmark": functools.partial(_benchmark, runtime),
            "_benchmark_for_autotune": benchmark_once,
        }
        patches.set_present(importlib.import_module(name), replacements)


def _benchmark(runtime: VirtualRuntime, callable: Callable[..., Any], **options: Any) -> float:
    """Return the microseconds of one run of `callable`: predicted, or of this computer."""
    generator = options.get("workspace_generator")
    workspace = options["kernel_arguments"] if generator is None else generator()
    return measure_once_ms(runtime, lambda: callable(*workspace.args, **workspace.kwargs)) * 1e3
