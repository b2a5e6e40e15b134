"""What of the virtual GPU works on this machine; for `halfbyte doctor`."""

import importlib.util

from halfbyte.errors import HalfbyteError
from halfbyte.virtual.driver.stand_in import find_library
from halfbyte.virtual.library import load_core


def find_missing_parts() -> list[str]:
    """Return one sentence for each part without which `halfbyte run` cannot work."""
    missing = []
    for part in (load_core, find_library):
        try:
            part()
        except (HalfbyteError, OSError) as error:
            missing.append(str(error))
    return missing


def find_absent_packages() -> list[str]:
    """Return the packages of CuTe DSL programs that are not installed; nothing is imported."""
    wanted = {
        "cutlass": "nvidia-cutlass-dsl",
        "tvm_ffi": "apache-tvm-ffi",
    }
    return [name for module, name in wanted.items() if importlib.util.find_spec(module) is None]
