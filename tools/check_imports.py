"""Check that folders import one way and that the CPU half never imports CuTe or CUDA.

Device code (a module of `device` or `kernels` that imports CuTe at its top) may be imported at
module level by other device code alone; everything else does it inside the function that needs it.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from repository import Finding, list_python_files, parse_python, run_check

PACKAGE = "halfbyte"

# A folder may import from itself and from folders before it, nothing else.
FOLDERS = (
    "native",
    "formats",
    "workers",
    "reference",
    "svdquant",
    "checkpoints",
    "cpu",
    "arch",
    "ptx",
    "virtual",
    "timing",
    "checks",
    "device",
    "kernels",
    "runtime",
    "ops",
    "nn",
    "bench",
    "cli",
)
# Free for all; they import nothing of the package.
ROOT_MODULES = ("cache_home", "errors", "peak_memory", "version", "wording")
FIRST_GPU_FOLDER = "device"
GPU_PACKAGES = ("cutlass", "cuda", "cute", "triton")
DEVICE_CODE_FOLDERS = ("device", "kernels")
# What the host reads of a kernel without CuTe: never device code.
HOST_MODULES = ("__init__", "config", "placement", "source", "kernel_source")


def find_bad_imports(root: Path) -> Iterator[Finding]:
    """Yield a Finding for every import against the folder order or into GPU packages."""
    package_root = root / "src" / PACKAGE
    trees = {
        path: parse_python(path) for path in list_python_files(root) if package_root in path.parents
    }
    device_code = find_device_code(
        {path.relative_to(package_root).parts: tree for path, tree in trees.items()}
    )
    for path, tree in trees.items():
        parts = path.relative_to(package_root).parts
        relative = path.relative_to(root).as_posix()
        yield from _check_module(relative, parts, tree)
        if _name_module(parts) not in device_code:
            yield from _check_device_imports(relative, parts, tree, device_code)


def find_device_code(trees: dict[tuple[str, ...], ast.Module]) -> set[str]:
    """Return the full names of modules under `device` and `kernels` that import CuTe at the top."""
    found = set()
    for parts, tree in trees.items():
        if not _may_be_device_code(parts):
            continue
        targets = (
            target
            for node, is_lazy in list_imports(tree)
            if not is_lazy
            for target in _list_targets(node, parts)
        )
        if any(target.partition(".")[0] in GPU_PACKAGES for target in targets):
            found.add(_name_module(parts))
    return found


def _may_be_device_code(parts: tuple[str, ...]) -> bool:
    return parts[0] in DEVICE_CODE_FOLDERS and Path(parts[-1]).stem not in HOST_MODULES


def _name_module(parts: tuple[str, ...]) -> str:
    return ".".join([PACKAGE, *parts[:-1], Path(parts[-1]).stem])


def _check_device_imports(
    relative: str, parts: tuple[str, ...], tree: ast.Module, device_code: set[str]
) -> Iterator[Finding]:
    for node, is_lazy in list_imports(tree):
        names = set(_list_targets(node, parts))
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        for name in sorted(names & device_code) if not is_lazy else ():
            yield Finding(
                relative, node.lineno, f"{name} is device code: import it inside the function"
            )


def _check_module(relative: str, parts: tuple[str, ...], tree: ast.Module) -> Iterator[Finding]:
    folder = parts[0] if len(parts) > 1 else ""
    if folder and folder not in FOLDERS:
        yield Finding(relative, 1, f"folder {folder!r} is not in the order of tools/check_imports")
        return
    for node, is_lazy in list_imports(tree):
        for target in _list_targets(node, parts):
            message = find_rule_broken(folder, target, is_lazy or _may_be_device_code(parts))
            if message:
                yield Finding(relative, node.lineno, message)


def list_imports(tree: ast.Module) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Return every import statement and whether it runs only when a function is called."""
    found: list[tuple[ast.Import | ast.ImportFrom, bool]] = []

    def visit(node: ast.AST, is_lazy: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append((node, is_lazy))
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, is_lazy or is_function or _is_type_checking(node))

    visit(tree, False)
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _list_targets(node: ast.Import | ast.ImportFrom, parts: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level:  # from . import x, from ..formats import y
        package = [PACKAGE, *parts[:-1]]
        above = package[: len(package) - node.level + 1]
        module = ".".join([*above, node.module] if node.module else above)
    else:
        module = node.module or ""
    if module == PACKAGE:
        return [f"{PACKAGE}.{alias.name}" for alias in node.names]
    return [module]


def find_rule_broken(folder: str, target: str, is_lazy: bool) -> str:
    """Return what is wrong with importing `target` in `folder` ("" = package root), or ""."""
    head, _, rest = target.partition(".")
    if head in GPU_PACKAGES:
        return _find_gpu_rule_broken(folder, head, is_lazy)
    if head != PACKAGE:
        return ""
    imported = rest.partition(".")[0]
    if imported in ROOT_MODULES or imported.startswith("__") or not imported:
        return ""
    if folder == "":
        return f"the package root imports {imported}: it must stay light"
    if imported not in FOLDERS:
        return f"{target} is in no folder of the order"
    if FOLDERS.index(imported) > FOLDERS.index(folder):
        return f"{folder} imports {imported}, which comes later in the folder order"
    return ""


def _find_gpu_rule_broken(folder: str, name: str, is_lazy: bool) -> str:
    is_cpu_half = not folder or FOLDERS.index(folder) < FOLDERS.index(FIRST_GPU_FOLDER)
    if is_cpu_half:
        return f"{folder or 'the package root'} imports {name}: the CPU half runs without it"
    if not is_lazy:
        return f"{folder} imports {name} at module level; import it inside the function"
    return ""


if __name__ == "__main__":
    sys.exit(run_check(__doc__ or "", find_bad_imports))
