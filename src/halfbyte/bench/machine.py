"""What a result was measured on: processor, cores, software versions."""

import platform
from importlib import metadata

import torch

from halfbyte.runtime.processor import read_processor
from halfbyte.version import __version__


def describe_machine() -> dict[str, str | int]:
    """Return the processor's name, usable cores, torch's threads, and the operating system."""
    processor = read_processor()
    return {
        "cpu": processor.name,
        "cores": processor.num_cores,
        "torch_threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def list_versions(distributions: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of Python, halfbyte and the named distributions that are installed."""
    versions = {"python": platform.python_version(), "halfbyte": __version__}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
