"""Packing moves bits and nothing else; the orders are pinned to bytes derived by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import FormatError
from halfbyte.formats.packing import (
    NIBBLE_ORDERS,
    pack_nibbles,
    pack_sixbit,
    unpack_nibbles,
    unpack_sixbit,
)


def to_hex(data: torch.Tensor) -> str:
    return bytes(data.flatten().tolist()).hex()


def test_one_then_two_is_0x42_low_first_and_0x24_high_first() -> None:
    codes = torch.tensor([2, 4], dtype=torch.uint8)  # E2M1 1.0 and 2.0
    assert to_hex(pack_nibbles(codes, "low_first")) == "42"
    assert to_hex(pack_nibbles(codes, "high_first")) == "24"


def test_linear_and_ggml_orders_of_32_codes() -> None:
    codes = [*range(8), *range(8), *range(8, 16), *range(8, 16)]
    tensor = torch.tensor(codes, dtype=torch.uint8)
    assert to_hex(pack_nibbles(tensor)) == "103254761032547698badcfe98badcfe"
    assert to_hex(pack_nibbles(tensor, "ggml_split")) == "8091a2b3c4d5e6f78091a2b3c4d5e6f7"


def test_six_bit_codes_form_a_little_endian_bit_stream() -> None:
    codes = torch.tensor([1, 2, 3, 63], dtype=torch.uint8)
    stream = sum(int(code) << (6 * i) for i, code in enumerate(codes))
    assert bytes(pack_sixbit(codes).tolist()) == stream.to_bytes(3, "little")


@given(data=st.data(), order=st.sampled_from(NIBBLE_ORDERS), rows=st.integers(0, 3))
def test_unpacking_undoes_packing_of_nibbles(data: st.DataObject, order: str, rows: int) -> None:
    columns = data.draw(st.integers(0, 3)) * 32
    codes = make_codes(data, rows, columns, 16)
    packed = pack_nibbles(codes, order)
    assert packed.shape == (rows, columns // 2)
    assert torch.equal(unpack_nibbles(packed, order), codes)


@given(data=st.data(), rows=st.integers(0, 3), quads=st.integers(0, 9))
def test_unpacking_undoes_packing_of_six_bits(data: st.DataObject, rows: int, quads: int) -> None:
    codes = make_codes(data, rows, 4 * quads, 64)
    packed = pack_sixbit(codes)
    assert packed.shape == (rows, 3 * quads)
    assert torch.equal(unpack_sixbit(packed), codes)


def make_codes(data: st.DataObject, rows: int, columns: int, limit: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    return torch.randint(0, limit, (rows, columns), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("order", NIBBLE_ORDERS)
def test_every_byte_survives_unpacking_and_packing(order: str) -> None:
    data = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(data, order), order), data)


def test_strided_codes_pack_as_their_copy() -> None:
    codes = torch.randint(0, 16, (64, 64), dtype=torch.uint8).t()
    for order in NIBBLE_ORDERS:
        assert torch.equal(pack_nibbles(codes, order), pack_nibbles(codes.contiguous(), order))


def test_wrong_arguments_are_named() -> None:
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    with pytest.raises(FormatError, match="nibble order 'big' is unknown; use one of: low_first"):
        pack_nibbles(codes, "big")
    with pytest.raises(FormatError, match="nibble order 'big' is unknown"):
        unpack_nibbles(codes, "big")
    with pytest.raises(FormatError, match=r"codes: dtype torch\.int32, wanted torch\.uint8"):
        pack_nibbles(codes.int())
    with pytest.raises(FormatError, match=r"shape \(2, 31\), .* multiple of 2; pad with zero"):
        pack_nibbles(codes[:, :31])
    with pytest.raises(FormatError, match="multiple of 32"):
        pack_nibbles(codes[:, :30], "ggml_split")
    with pytest.raises(FormatError, match="codes: 16 does not fit in 4 bits"):
        pack_nibbles(torch.tensor([0, 16], dtype=torch.uint8))
    with pytest.raises(FormatError, match="codes: 64 does not fit in 6 bits"):
        pack_sixbit(torch.tensor([0, 64, 0, 0], dtype=torch.uint8))
    with pytest.raises(FormatError, match=r"data: shape \(4,\), .* multiple of 3"):
        unpack_sixbit(torch.zeros(4, dtype=torch.uint8))
