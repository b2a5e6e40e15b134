"""Builds the optional compiled library: one plain C ABI, no Python and no torch headers.

Each instruction-set unit is compiled with its own flags and chosen at run time, so that a virtual
environment can move between CPUs. Without a compiler the install succeeds and the package works
on its torch path; `halfbyte doctor` says so.
"""

import os
import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/halfbyte/native/csrc")
PACKAGE = Path("halfbyte/native")
LIBRARY = "_halfbyte.so"
# No fused multiply-add may replace a product and a sum: the bytes must equal the torch path's.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
FLAGS += ["-fno-math-errno", "-g0", "-Wall", "-Wextra", "-pthread"]
X86_FLAGS = {
    "isa_avx2.cpp": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
    "isa_avx512.cpp": [
        *("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mavx512f", "-mavx512bw", "-mavx512vl"),
        *("-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512"),
    ],
}


class BuildLibrary(build_ext):
    """Compiles every unit with its own flags, side by side, and links one shared library."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the fixed file name: the library is no Python extension module."""
        return str(Path(*fullname.split(".")[:-1], LIBRARY))

    def run(self) -> None:
        """Build, or warn: a failed build leaves a working package without compiled loops."""
        try:
            super().run()
        except Exception as error:
            print(
                f"\nwarning: halfbyte's compiled loops were not built ({error}).\n"
                "The package works without them, slower. To build them install a C++17 compiler\n"
                "(Debian: apt install g++) and reinstall halfbyte.\n",
                file=sys.stderr,
            )

    def build_extension(self, ext: Extension) -> None:
        """Compile and link `ext`; the target file is replaced in one step."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(self._compile, ext.sources))
        partial = target.with_suffix(f".{os.getpid()}.partial")
        self.compiler.link_shared_object(
            objects, str(partial), extra_postargs=["-pthread"], target_lang="c++"
        )
        os.replace(partial, target)  # a process that has the old file mapped keeps it

    def copy_extensions_to_source(self) -> None:
        """Put the library beside its sources (editable install) by rename, never by rewriting."""
        built = Path(self.build_lib) / PACKAGE / LIBRARY
        target = Path("src") / PACKAGE / LIBRARY
        partial = target.with_suffix(f".{os.getpid()}.partial")
        shutil.copyfile(built, partial)
        os.replace(partial, target)

    def _compile(self, source: str) -> str:
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        flags = FLAGS + (X86_FLAGS.get(Path(source).name, []) if is_x86 else [])
        (compiled,) = self.compiler.compile(
            [source], output_dir=self.build_temp, extra_postargs=flags, depends=self._headers()
        )
        return str(compiled)

    def _headers(self) -> list[str]:
        return [str(path) for path in SOURCES.glob("*.h")]


setup(
    ext_modules=[
        Extension(
            "halfbyte.native._halfbyte",
            sorted(str(path) for path in SOURCES.glob("*.cpp")),
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildLibrary},
)
