"""Forms of loads, stores, atomics and copies: the grammar takes legal spellings and no others."""

import pytest

from halfbyte.ptx.forms import INSTRUCTION_FORMS
from halfbyte.ptx.forms.bulk_copy import find_slot_masks
from halfbyte.ptx.modifiers import group, parse_modifiers

LEGAL = [
    ("ld.relaxed.gpu.global.L1::evict_last.L2::cache_hint.v4.b32", "=b32*4 [b64] ?b64"),
    ("ld.shared::cluster.u8", "=b8 [b32]"),
    ("ld.global.nc.v8.f32", "=b32*8 [b64]"),
    ("st.release.cluster.shared::cluster.b64", "[b32] b64"),
    ("atom.acq_rel.cta.shared::cta.cas.b128", "=b128 [b32] b128 b128"),
    ("red.global.add.noftz.v8.bf16", "[b64] b16*8"),
    ("cp.async.ca.shared.global.L2::cache_hint.L2::128B", "[b32] [b64] imm b64"),
    (
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.cp_mask",
        "[b64] [b32] b32 b64 b32",
    ),
    (
        "cp.async.bulk.tensor.5d.im2col.cta_group::2.shared::cluster.global"
        ".mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint",
        "[b32] [b64,{b32*5}] [b32] b16*3 b32 b64",
    ),
    (
        "cp.async.bulk.tensor.2d.tile::gather4.shared::cta.global.mbarrier::complete_tx::bytes",
        "[b32] [b64,{b32*5}] [b32]",
    ),
    ("cp.reduce.async.bulk.tensor.1d.global.shared::cta.max.bulk_group", "[b64,{b32*1}] [b32]"),
]

ILLEGAL = [
    "ld.global.v8.b64",  # 512 bits
    "ld.global.v2.b128",
    "ld.shared.global.u32",
    "ld.global.v4",
    "ld.global.u33",
    "st.const.u32",
    "atom.global.add.b32",
    "atom.global.inc.u64",
    "red.global.exch.b32",
    "red.global.cas.b32",
    "red.global.add.v8.f32",
    "red.global.add.v2.u32",
    "cp.async.ca.global.shared",
    "cp.async.bulk.shared::cta.shared::cluster.mbarrier::complete_tx::bytes",
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.multicast::cluster",
    "cp.async.bulk.global.shared::cta.mbarrier::complete_tx::bytes",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32",
    "cp.async.bulk.tensor.3d.tile::gather4.shared::cta.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.2d.shared::cta.global.im2col.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.2d.global.shared::cta.tile::gather4.bulk_group",
    "cp.async.bulk.tensor.6d.shared::cta.global.mbarrier::complete_tx::bytes",
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile::scatter4.bulk_group",
]


@pytest.mark.parametrize(("name", "operands"), LEGAL)
def test_legal_spellings_have_their_operands(name, operands):
    assert INSTRUCTION_FORMS[name].operands == operands
    assert INSTRUCTION_FORMS[name].name == name


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_spellings_have_no_form(name):
    assert name not in INSTRUCTION_FORMS


def test_a_copy_with_a_third_number_reads_a_size_or_a_predicate():
    form = INSTRUCTION_FORMS["cp.async.cg.shared.global"]
    assert [each.operands for each in form.alternatives] == [
        "[b32] [b64] imm b32",
        "[b32] [b64] imm pred",
    ]


def test_slot_masks_point_at_registers_and_not_at_offsets():
    narrow, wide = find_slot_masks("[b32] [b64,{b32*2}] [b32] imm b16*2 b64")
    # entries: 0 slot, 1 offset, 2 map, 3 offset, 4-5 coordinates, 6 slot, 7 offset, 8 imm, 9-10, 11
    assert narrow == 1 << 0 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 9 | 1 << 10
    assert wide == 1 << 2 | 1 << 11


def test_modifiers_are_counted_by_group():
    groups = (group("size", "a b", least=1), group("rest", "c d", most=2))
    assert parse_modifiers("op.c.a.d", "op", groups) == {"size": ("a",), "rest": ("c", "d")}
    assert parse_modifiers("op.c", "op", groups) is None
    assert parse_modifiers("op.a.b", "op", groups) is None
    assert parse_modifiers("op.a.x", "op", groups) is None
    assert parse_modifiers("operation.a", "op", groups) is None
