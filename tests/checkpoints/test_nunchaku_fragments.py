"""Fragment orders against files written by nunchaku's own packer (revision 3a3cc3d)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.checkpoints import nunchaku_fragments as fragments
from halfbyte.errors import FormatError
from halfbyte.formats.packing import unpack_nibbles

DATA = Path(__file__).parent.parent / "data" / "nunchaku"


@pytest.fixture(params=["int4", "nvfp4"])
def golden(request):
    packed = load_file(DATA / f"nunchaku_{request.param}_packed.safetensors")
    plain = load_file(DATA / f"nunchaku_{request.param}_plain.safetensors")
    return request.param, {name.removeprefix("layer."): t for name, t in packed.items()}, plain


def test_codes_are_those_of_the_packer(golden):
    _, packed, plain = golden
    codes = fragments.unpack_codes(packed["qweight"])
    assert torch.equal(unpack_nibbles(codes), plain["codes"].to(torch.uint8))
    assert torch.equal(fragments.pack_codes(codes), packed["qweight"])


def test_scales_are_those_of_the_packer(golden):
    precision, packed, plain = golden
    unpack, pack = {
        "int4": (fragments.unpack_float_scales, fragments.pack_float_scales),
        "nvfp4": (fragments.unpack_byte_scales, fragments.pack_byte_scales),
    }[precision]
    scales = unpack(packed["wscales"])
    assert torch.equal(scales.float(), plain["block_scales"].float())
    assert torch.equal(pack(scales).view(torch.uint8), packed["wscales"].view(torch.uint8))


def test_low_rank_factors_are_those_of_the_packer(golden):
    _, packed, plain = golden
    assert torch.equal(fragments.unpack_lora_down(packed["proj_down"]), plain["lora_down"])
    assert torch.equal(fragments.unpack_lora_up(packed["proj_up"]), plain["lora_up"])
    assert torch.equal(fragments.pack_lora_down(plain["lora_down"]), packed["proj_down"])
    assert torch.equal(fragments.pack_lora_up(plain["lora_up"]), packed["proj_up"])


@pytest.mark.parametrize(("name", "plain_name"), [("bias", "bias"), ("smooth_factor", "smooth")])
def test_vectors_are_those_of_the_packer(golden, name, plain_name):
    _, packed, plain = golden
    assert torch.equal(fragments.unpack_vector(packed[name]), plain[plain_name])
    assert torch.equal(fragments.pack_vector(plain[plain_name]), packed[name])


def test_sizes_that_fill_no_tile_are_refused_with_the_multiple():
    with pytest.raises(FormatError, match="multiples of 128"):
        fragments.unpack_codes(torch.zeros(100, 32, dtype=torch.int8))
    with pytest.raises(FormatError, match="multiples of 16"):
        fragments.pack_lora_up(torch.zeros(128, 24))
