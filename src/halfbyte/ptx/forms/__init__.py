"""The instruction forms known, one module per family, keyed by full dotted name.

`INSTRUCTION_FORMS` is made on first use from every module of this folder that has a `FORMS` tuple.
"""

import importlib
import pkgutil

from halfbyte.ptx.instruction_form import InstructionForm, index_forms

__all__ = ["INSTRUCTION_FORMS"]


def _list_families() -> dict[str, tuple[InstructionForm, ...]]:
    families = {}
    for module in pkgutil.iter_modules(__path__):
        families[module.name] = importlib.import_module(f"{__name__}.{module.name}").FORMS
    return families


INSTRUCTION_FORMS: dict[str, InstructionForm] = index_forms(*_list_families().values())
