"""bar, barrier.cta and bar.warp.sync: barriers of a CTA and of a warp."""

from halfbyte.ptx.instruction_form import Convergence, InstructionForm

# (spelling, is aligned); `bar` is `barrier` with .aligned (PTX ISA, "bar, barrier").
_SPELLINGS = (
    ("bar.{}", True),
    ("bar.cta.{}", True),
    ("barrier.{}.aligned", True),
    ("barrier.cta.{}.aligned", True),
    ("barrier.{}", False),
    ("barrier.cta.{}", False),
)
# (operation, result type, result width, number that virtual/machine/barriers.h gives it)
_REDUCTIONS = (("popc", "u32", "b32", 0), ("and", "pred", "pred", 1), ("or", "pred", "pred", 2))


def _list_spelling(spelling: str, is_aligned: bool) -> list[InstructionForm]:
    convergence: Convergence = "aligned" if is_aligned else "none"
    attributes = (int(is_aligned),)
    forms = [
        InstructionForm(
            spelling.format("sync"), "cta_barrier", "b32 ?b32", "bar.sync", attributes, convergence
        ),
        InstructionForm(
            spelling.format("arrive"),
            "cta_barrier",
            "b32 b32",
            "bar.arrive",
            attributes,
            convergence,
        ),
    ]
    for operation, result, width, number in _REDUCTIONS:
        name = f"{spelling.format(f'red.{operation}')}.{result}"
        operands = f"={width} b32 ?b32 pred"
        reduction = (int(is_aligned), number)
        forms.append(
            InstructionForm(name, "cta_barrier", operands, "bar.red", reduction, convergence)
        )
    return forms


FORMS: tuple[InstructionForm, ...] = (
    *(form for spelling in _SPELLINGS for form in _list_spelling(*spelling)),
    # Lanes may meet from different instructions: the handler, not the scheduler, gathers them.
    InstructionForm("bar.warp.sync", "cta_barrier", "b32", "bar.warp.sync"),
    InstructionForm("barrier.warp.sync", "cta_barrier", "b32", "bar.warp.sync"),
)
