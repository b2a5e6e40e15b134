"""All conformance programs, by family."""

import importlib
from functools import lru_cache

from ..program import ConformanceProgram

FAMILIES = (
    *("integer", "float", "convert", "collective", "atomic", "control", "memory", "mbarrier"),
    *("cluster", "bulk", "tile", "im2col", "tensor", "wgmma", "fault"),
)


@lru_cache(maxsize=1)
def list_programs() -> tuple[ConformanceProgram, ...]:
    """Return every program, in the order of the families."""
    programs: list[ConformanceProgram] = []
    for family in FAMILIES:
        module = importlib.import_module(f"{__name__}.{family}")
        programs += module.make_programs()
    names = [program.name for program in programs]
    assert len(set(names)) == len(names), "two programs have the same name"
    return tuple(programs)
