"""The tables of instruction forms, the compiled core and the documentation say the same."""

import subprocess
import sys
from pathlib import Path

from halfbyte.ptx.forms import INSTRUCTION_FORMS
from halfbyte.virtual.library import list_handlers
from halfbyte.virtual.lowering.lower import RUNTIME_FORMS

ROOT = Path(__file__).resolve().parents[2]
# What lowering adds around instructions, and what stands for forms that nobody knows.
ADDED = {"shared_address.b32", "shared_address.b64", "narrow.b64", "widen.b32", "extend.b32"}
ADDED |= {"mov.sreg", "unsupported"}


def list_named_handlers() -> set[str]:
    forms = [*INSTRUCTION_FORMS.values(), *RUNTIME_FORMS.values()]
    return {shape.handler for form in forms for shape in (form, *form.alternatives)}


def test_every_handler_that_a_form_names_is_in_the_core() -> None:
    assert sorted((list_named_handlers() | ADDED) - set(list_handlers())) == []


def test_documented_table_is_what_the_forms_say() -> None:
    command = [sys.executable, "tools/make_instruction_table.py", "--check"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout
