"""Which GPU kernels can run on this machine and how they get here; for `halfbyte doctor`."""

from collections.abc import Collection
from dataclasses import dataclass

from halfbyte.errors import HalfbyteError
from halfbyte.runtime.artifact import list_folders, read_artifacts
from halfbyte.runtime.kernel_cache import find_cache_folder
from halfbyte.runtime.kernel_key import make_source_key, read_toolchain
from halfbyte.runtime.linking import find_c_compiler
from halfbyte.runtime.shipped_kernels import LINEARS, list_shipped


@dataclass(frozen=True)
class KernelSupply:
    """Where compiled kernels of one target come from.

    Attributes:
        missing: kernels that a 4-bit linear of the target lacks.
        built: kernels that artifacts in use hold, of those shipped.
        shipped: kernels that are shipped, configurations counted.
    """

    missing: tuple[str, ...]
    built: int
    shipped: int


def find_supply(target: str) -> KernelSupply:
    """Return what there is for a target.

    Raises:
        HalfbyteError: an artifact folder in use is damaged or of another version.
    """
    sources = list_shipped(target)
    written = {source.name for source in sources}
    held = {key for folder in list_folders() for key in read_artifacts(folder).entries}
    built = sum(make_source_key(source) in held for source in sources) if held else 0
    lacking = [tuple(name for name in names if name not in written) for names in LINEARS]
    missing = min(lacking, key=len)
    return KernelSupply(missing, built, len(sources))


def describe_target(target: str, gpu: str, present_targets: Collection[str]) -> tuple[str, str]:
    """Return (state, detail) of the 4-bit linear on GPUs of a target.

    Args:
        target: the PTX target.
        gpu: name of its virtual GPU.
        present_targets: those of the GPUs in this machine.
    """
    try:
        supply = find_supply(target)
    except HalfbyteError as error:
        return "no", str(error)
    if supply.missing:
        what = ", ".join(supply.missing)
        return "not in this version", f"{what} is not written for {target}"
    origin = _describe_origin(supply)
    if not origin:
        return "no", 'no compiler and no artifacts: pip install "halfbyte[kernels]"'
    if target not in present_targets:
        return "no", f"no such GPU here; backend='virtual-{gpu}' runs them on the CPU ({origin})"
    return "yes", f"{target}, {origin}"


def _describe_origin(supply: KernelSupply) -> str:
    parts = []
    if supply.built:
        parts.append(f"{supply.built} of {supply.shipped} from artifacts")
    if read_toolchain() is not None:
        parts.append("compiled when first used")
    return ", ".join(parts)


def describe_compiler() -> tuple[str, str]:
    """Return (state, detail) of compiling kernels here: tools and where results are kept."""
    tools = read_toolchain()
    if tools is None:
        return "no", 'needs CuTe DSL and TVM FFI: pip install "halfbyte[kernels]"'
    linker = find_c_compiler()
    kept = f"kept in {find_cache_folder()}"
    if linker is None:
        return "slower", f"CuTe DSL {tools.cute_dsl}, no C compiler: loading needs CuTe DSL; {kept}"
    return "yes", f"CuTe DSL {tools.cute_dsl}, linked by {linker}; {kept}"
