"""Control flow (PTX ISA, "Control Flow Instructions"): branches, exit, trap."""

from halfbyte.ptx.instruction_form import InstructionForm

FAMILY = "control"

FORMS = (
    *(InstructionForm(name, FAMILY, "label", "bra") for name in ("bra", "bra.uni")),
    *(InstructionForm(name, FAMILY, "b32 label", "brx.idx") for name in ("brx.idx", "brx.idx.uni")),
    *(
        InstructionForm(name, FAMILY, "", "exit", terminates=True)
        for name in ("exit", "ret", "ret.uni")
    ),
    InstructionForm("trap", FAMILY, "", "trap", terminates=True),
    InstructionForm("brkpt", FAMILY, "", "trap"),
)
