"""Finds model files inside installed packages without importing those packages.

The packages' own modules pull in inference engines that nothing here needs (llama.cpp,
sentence-transformers), so only their data files are used.
"""

from importlib.util import find_spec
from pathlib import Path

from halfbyte.errors import MissingDependencyError


def find_packaged_file(package: str, file: str, distribution: str) -> Path:
    """Return the path of `file` inside the installed top-level `package`; imports nothing.

    Args:
        package: the import name of a top-level package.
        file: a path relative to the package's folder, with forward slashes.
        distribution: the name to install it by.

    Raises:
        MissingDependencyError: the package or the file is absent; names the pip command.
    """
    command = f"pip install --no-deps {distribution}"
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        raise MissingDependencyError(f"package {package!r} is not installed; run: {command}")
    for folder in folders:
        path = Path(folder) / file
        if path.is_file():
            return path
    raise MissingDependencyError(
        f"package {package!r} in {list(folders)} has no file {file!r}; "
        f"reinstall it: {command} --force-reinstall"
    )
