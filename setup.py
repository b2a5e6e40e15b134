"""Builds the optional compiled libraries: plain C interfaces, no Python and no torch headers.

Without a compiler the install succeeds: the package then works on its torch path, without the
virtual GPU, and `halfbyte doctor` says so.
"""

import hashlib
import os
import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path("src/halfbyte")
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
# No fused multiply-add may replace a product and a sum: the bytes must equal the torch path's.
FLAGS = ["-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
FLAGS += ["-fno-math-errno", "-g0", "-Wall", "-Wextra", "-pthread"]


@dataclass(frozen=True)
class CompiledLibrary:
    """One shared library: its place in the package, its folders of sources, its flags.

    `source_flags` are further flags of single files, by file name.
    """

    name: str  # "halfbyte.native._halfbyte" is halfbyte/native/_halfbyte.so
    folders: tuple[str, ...]
    include: str = ""
    flags: tuple[str, ...] = ()
    source_flags: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """Where the library lies below `src`."""
        return Path(*self.name.split(".")).with_suffix(".so")

    @property
    def sources(self) -> list[str]:
        """The C and C++ files, sorted."""
        return sorted(
            str(path)
            for folder in self.folders
            for suffix in ("c", "cpp")
            for path in (ROOT / folder).glob(f"*.{suffix}")
        )

    def make_key(self) -> str:
        """Return a digest of everything that the library is made from."""
        paths = [Path("setup.py"), *map(Path, self.sources + self.headers)]
        text = "\0".join([*self.flags, *(f"{path}\0{path.read_text()}" for path in paths)])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def headers(self) -> list[str]:
        """Every header beside the sources: a change of one rebuilds the library."""
        return [str(path) for folder in self.folders for path in (ROOT / folder).glob("*.h")]


# The loops of the quantizer choose their instruction set at run time, file by file, so that a
# virtual environment can move between CPUs.
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
NATIVE = CompiledLibrary(
    "halfbyte.native._halfbyte",
    ("native/csrc",),
    source_flags={
        "isa_avx2.cpp": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
        "isa_avx512.cpp": (
            *("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
            *AVX512,
            "-mprefer-vector-width=512",
        ),
    }
    if IS_X86
    else {},
)
DRIVER = CompiledLibrary("halfbyte.virtual.driver._cuda_runtime_stand_in", ("virtual/driver/csrc",))
# The virtual GPU's core is built whole for one instruction set: the best that this machine has.
LEVEL_FLAGS = {
    "generic": (),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
# Nobody reads floating-point exceptions here, and without their side effects a choice between two
# results becomes a blend: most loops over lanes vectorize only so. No value changes.
SPECULATIVE = ("-fno-trapping-math",)
LEVEL_NEEDS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "bmi2", "fma", "f16c"},
    "avx2": {"avx2", "bmi2", "fma", "f16c", "movbe"},
}


def choose_levels() -> list[str]:
    """Return the instruction sets to build the virtual GPU's core for.

    HALFBYTE_VIRTUAL_LEVELS (a comma-separated list, or "none") overrides the choice.
    """
    if "HALFBYTE_VIRTUAL_LEVELS" in os.environ:
        wanted = os.environ["HALFBYTE_VIRTUAL_LEVELS"].split(",")
        return [level for level in wanted if level in LEVEL_FLAGS]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    best = [level for level, needs in LEVEL_NEEDS.items() if IS_X86 and flags >= needs]
    return best[:1] or ["generic"]


LIBRARIES = {
    library.name: library
    for library in (
        NATIVE,
        DRIVER,
        *(
            CompiledLibrary(
                f"halfbyte.virtual._virtual_{level}",
                ("virtual/machine", "virtual/exec"),
                include="virtual",
                flags=(*LEVEL_FLAGS[level], *SPECULATIVE),
            )
            for level in choose_levels()
        ),
    )
}


class BuildLibraries(build_ext):
    """Compiles the files of each library side by side and links them."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the fixed file name: the libraries are no Python extension modules."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Build, or warn: what cannot be built leaves a working package without it."""
        try:
            self._build(LIBRARIES[ext.name])
        except Exception as error:
            print(
                f"\nwarning: {ext.name} was not built ({error}).\n"
                "The package works without it: slower, or without the virtual GPU. To build it\n"
                "install a C++17 compiler (Debian: apt install g++) and reinstall halfbyte.\n",
                file=sys.stderr,
            )

    def copy_extensions_to_source(self) -> None:
        """Put the libraries beside their sources (editable install) by rename, never rewriting."""
        for library in LIBRARIES.values():
            built = Path(self.build_lib) / library.file
            if built.exists():
                target = Path("src") / library.file
                partial = target.with_suffix(f".{os.getpid()}.partial")
                shutil.copyfile(built, partial)
                os.replace(partial, target)  # a process that has the old file mapped keeps it

    def _build(self, library: CompiledLibrary) -> None:
        target = Path(self.get_ext_fullpath(library.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        built = Path("src") / library.file
        key_file = built.with_suffix(".so.key")
        key = library.make_key()
        if built.exists() and key_file.exists() and key_file.read_text() == key:
            if built.resolve() != target.resolve():
                shutil.copyfile(built, target)  # another environment built the same sources
            return
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(lambda file: self._compile(library, file), library.sources))
        partial = target.with_suffix(f".{os.getpid()}.partial")
        self.compiler.link_shared_object(
            objects, str(partial), extra_postargs=["-pthread"], target_lang="c++"
        )
        os.replace(partial, target)
        key_file.write_text(key)

    def _compile(self, library: CompiledLibrary, source: str) -> str:
        flags = [*FLAGS, *library.flags, *library.source_flags.get(Path(source).name, ())]
        if source.endswith(".cpp"):
            flags.append("-std=c++17")
        (compiled,) = self.compiler.compile(
            [source],
            output_dir=str(Path(self.build_temp) / library.name),
            include_dirs=[str(ROOT / library.include)] if library.include else [],
            extra_postargs=flags,
            depends=library.headers,
        )
        return str(compiled)


setup(
    ext_modules=[
        Extension(library.name, library.sources, language="c++") for library in LIBRARIES.values()
    ],
    cmdclass={"build_ext": BuildLibraries},
)
