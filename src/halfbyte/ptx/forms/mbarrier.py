"""mbarrier: asynchronous barriers in shared memory (PTX ISA, "Parallel Synchronization")."""

from halfbyte.ptx.instruction_form import InstructionForm

# Attributes are read by virtual/exec/mbarrier.cpp and mbarrier_wait.cpp.
_SHARED, _GENERIC = 0, 1
_EXPECT_TX, _DROP, _NO_COMPLETE = 1, 2, 4

_OWN_SPACES = ("", ".shared", ".shared::cta")
_SPACES = (*_OWN_SPACES, ".shared::cluster")
_SCOPES = (".cta", ".cluster")
_RELAXED = ("", ".relaxed", *_SCOPES, *(f".relaxed{scope}" for scope in _SCOPES))
_ARRIVE_ORDERS = (
    "",
    ".release",
    ".relaxed",
    *(f"{order}{scope}" for order in (".release", ".relaxed") for scope in _SCOPES),
)
_WAIT_ORDERS = (
    "",
    ".acquire",
    ".relaxed",
    *(f"{order}{scope}" for order in (".acquire", ".relaxed") for scope in _SCOPES),
)
_ARRIVE_KINDS = (
    ("arrive", 0),
    ("arrive.expect_tx", _EXPECT_TX),
    ("arrive_drop", _DROP),
    ("arrive_drop.expect_tx", _DROP | _EXPECT_TX),
)


def _address(space: str) -> str:
    return "[b32]" if space else "[b64]"


def _space_number(space: str) -> int:
    return _SHARED if space else _GENERIC


def _list_life_forms() -> list[InstructionForm]:
    forms = []
    for space in _OWN_SPACES:
        attributes = (_space_number(space),)
        address = _address(space)
        forms.append(
            InstructionForm(
                f"mbarrier.init{space}.b64",
                "mbarrier",
                f"{address} b32",
                "mbarrier.init",
                attributes,
            )
        )
        forms.append(
            InstructionForm(
                f"mbarrier.inval{space}.b64", "mbarrier", address, "mbarrier.inval", attributes
            )
        )
    return forms


def _list_arrive_forms() -> list[InstructionForm]:
    forms = []
    for kind, flags in _ARRIVE_KINDS:
        amount = "b32" if flags & _EXPECT_TX else "?b32"
        for order in _ARRIVE_ORDERS:
            for space in _SPACES:
                name = f"mbarrier.{kind}{order}{space}.b64"
                operands = f"=b64 {_address(space)} {amount}"
                attributes = (_space_number(space), flags)
                forms.append(
                    InstructionForm(name, "mbarrier", operands, "mbarrier.arrive", attributes)
                )
    for kind, flags in (("arrive", _NO_COMPLETE), ("arrive_drop", _NO_COMPLETE | _DROP)):
        for order in ("", ".release.cta"):
            for space in _OWN_SPACES:
                name = f"mbarrier.{kind}.noComplete{order}{space}.b64"
                operands = f"=b64 {_address(space)} b32"
                attributes = (_space_number(space), flags)
                forms.append(
                    InstructionForm(name, "mbarrier", operands, "mbarrier.arrive", attributes)
                )
    return forms


def _list_transaction_forms() -> list[InstructionForm]:
    return [
        InstructionForm(
            f"mbarrier.{operation}{order}{space}.b64",
            "mbarrier",
            f"{_address(space)} b32",
            "mbarrier.tx",
            (_space_number(space), sign),
        )
        for operation, sign in (("expect_tx", 1), ("complete_tx", -1))
        for order in _RELAXED
        for space in _SPACES
    ]


def _list_wait_forms() -> list[InstructionForm]:
    forms = []
    for is_try in (0, 1):
        for is_parity in (0, 1):
            for order in _WAIT_ORDERS:
                for space in _OWN_SPACES:
                    kind = ("test_wait", "try_wait")[is_try] + ".parity" * is_parity
                    wanted = ("b64", "b32")[is_parity] + " ?b32" * is_try  # suspend-time hint
                    forms.append(
                        InstructionForm(
                            f"mbarrier.{kind}{order}{space}.b64",
                            "mbarrier",
                            f"=pred {_address(space)} {wanted}",
                            "mbarrier.wait",
                            (_space_number(space), is_try, is_parity),
                        )
                    )
    return forms


FORMS: tuple[InstructionForm, ...] = (
    *_list_life_forms(),
    *_list_arrive_forms(),
    *_list_transaction_forms(),
    *_list_wait_forms(),
    InstructionForm("mbarrier.pending_count.b64", "mbarrier", "=b32 b64", "mbarrier.pending_count"),
)
