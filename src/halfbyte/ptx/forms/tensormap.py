"""Changing tensor maps on the device (PTX ISA, "tensormap.replace", "tensormap.cp_fenceproxy").

Attributes of replace: field, state space, 1 for a 64-bit value, 1 when an ordinal is there.
"""

from halfbyte.ptx.forms.bulk_copy import find_slot_masks
from halfbyte.ptx.forms.memory_access import GENERIC, SPACES
from halfbyte.ptx.instruction_form import InstructionForm

FAMILY = "tensormap"

# Fields in the order of exec/tensormap.cpp: width of the new value, whether an ordinal picks a
# dimension.
FIELDS = {
    "global_address": ("b64", False),
    "rank": ("b32", False),
    "box_dim": ("b32", True),
    "global_dim": ("b32", True),
    "global_stride": ("b64", True),
    "element_stride": ("b32", True),
    "elemtype": ("b32", False),
    "interleave_layout": ("b32", False),
    "swizzle_mode": ("b32", False),
    "swizzle_atomicity": ("b32", False),
    "fill_mode": ("b32", False),
}
_ADDRESSES = {
    "": ("[b64]", GENERIC),
    ".global": ("[b64]", SPACES["global"]),
    ".shared::cta": ("[b32]", SPACES["shared"]),
}
_COPY_OPERANDS = "[b64] [b32] imm"

FORMS = (
    *(
        InstructionForm(
            f"tensormap.replace.tile.{field}{space}.b1024.{width}",
            FAMILY,
            f"{address} imm {width}" if has_ordinal else f"{address} {width}",
            "tensormap.replace",
            (number, space_number, int(width == "b64"), int(has_ordinal)),
        )
        for number, (field, (width, has_ordinal)) in enumerate(FIELDS.items())
        for space, (address, space_number) in _ADDRESSES.items()
    ),
    *(
        InstructionForm(
            "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic"
            f".release.{scope}.sync.aligned",
            FAMILY,
            _COPY_OPERANDS,
            "tensormap.cp_fenceproxy",
            find_slot_masks(_COPY_OPERANDS),
            convergence="aligned",
        )
        for scope in ("cta", "cluster", "gpu", "sys")
    ),
)
