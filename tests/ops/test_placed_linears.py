"""Placements are made once, follow what they were made from, and keep nothing alive."""

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

from halfbyte import ops
from halfbyte.errors import FormatError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.kernels.gemm_w4a4.placement import PlacedLinear
from halfbyte.ops import blackwell
from halfbyte.ops.blackwell import BlackwellPlacer
from halfbyte.ops.placed_linears import count_placed_bytes, find_placed, forget_placed
from tests.random_linears import LinearShape, make_linear


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[QuantizedLinear]:
    """Return a list that grows by one with every placement."""
    records: list[QuantizedLinear] = []
    place = blackwell.place_linear

    def place_and_note(linear: QuantizedLinear, dtype: torch.dtype) -> PlacedLinear:
        records.append(linear)
        return place(linear, dtype)

    monkeypatch.setattr(blackwell, "place_linear", place_and_note)
    return records


@pytest.fixture
def made_low_ranks(monkeypatch: pytest.MonkeyPatch) -> list[QuantizedLinear]:
    """Return a list that grows by one where the low-rank branch alone is placed again."""
    records: list[QuantizedLinear] = []
    replace = blackwell.replace_low_rank

    def replace_and_note(
        placed: PlacedLinear, linear: QuantizedLinear, dtype: torch.dtype
    ) -> PlacedLinear:
        records.append(linear)
        return replace(placed, linear, dtype)

    monkeypatch.setattr(blackwell, "replace_low_rank", replace_and_note)
    return records


def make_parts(k: int = 64, **changes: Any) -> tuple[list[torch.Tensor], ops.LinearSpec]:
    linear = make_linear(LinearShape(n=24, k=k, rank=8, **changes))
    return ops.list_parts(linear), ops.make_spec(linear)


def test_a_second_call_places_nothing(made: list[QuantizedLinear]) -> None:
    parts, spec = make_parts(parts=False)
    first = find_placed(parts, spec, BlackwellPlacer(torch.float16))
    assert find_placed(list(parts), spec, BlackwellPlacer(torch.float16)) is first
    absent_anew = [part if part.numel() else torch.empty(0) for part in parts]
    assert find_placed(absent_anew, spec, BlackwellPlacer(torch.float16)) is first
    assert len(made) == 1
    assert find_placed(parts, spec, BlackwellPlacer(torch.bfloat16)) is not first
    assert find_placed(parts, spec, BlackwellPlacer(torch.float16)) is first
    assert len(made) == 2


def assert_same_placement(left: PlacedLinear, right: PlacedLinear) -> None:
    for field in dataclasses.fields(PlacedLinear):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other), field.name
        else:
            assert one == other, field.name


@pytest.mark.parametrize("parts_too", [True, False], ids=["scaled", "codes_alone"])
@pytest.mark.parametrize("rank", [0, 8, 24])
def test_another_low_rank_branch_keeps_the_placed_weight(
    made: list[QuantizedLinear],
    made_low_ranks: list[QuantizedLinear],
    rank: int,
    parts_too: bool,
) -> None:
    parts, spec = make_parts(parts=parts_too)
    first = find_placed(parts, spec, BlackwellPlacer(torch.bfloat16))
    parts[6], parts[7] = torch.randn(rank, 64), torch.randn(24, rank)
    second = find_placed(parts, spec, BlackwellPlacer(torch.bfloat16))
    if rank:
        parts[7].mul_(0.5)
        second = find_placed(parts, spec, BlackwellPlacer(torch.bfloat16))
    assert second.weight_sf is first.weight_sf
    assert (len(made), len(made_low_ranks)) == (1, 2 if rank else 1)
    assert_same_placement(second, blackwell.place_linear(made_low_ranks[-1], torch.bfloat16))
    parts[7] = parts[7] * float("nan")
    if rank:
        with pytest.raises(FormatError, match="lora_up"):
            find_placed(parts, spec, BlackwellPlacer(torch.bfloat16))


@pytest.mark.parametrize("index", [0, 1, 2, 4, 5, 8], ids=lambda i: ops.PART_NAMES[i])
def test_a_part_written_in_place_or_replaced_is_placed_again(
    made: list[QuantizedLinear], index: int
) -> None:
    parts, spec = make_parts()
    find_placed(parts, spec, BlackwellPlacer(torch.bfloat16))
    parts[index].copy_(parts[index].clone())
    find_placed(parts, spec, BlackwellPlacer(torch.bfloat16))
    assert len(made) == 2
    parts[index] = parts[index].clone()
    find_placed(parts, spec, BlackwellPlacer(torch.bfloat16))
    assert len(made) == 3
    parts[index].data = parts[index].clone()  # the same tensor with other memory
    find_placed(parts, spec, BlackwellPlacer(torch.bfloat16))
    assert len(made) == 4
    find_placed(parts, spec, BlackwellPlacer(torch.bfloat16))
    assert len(made) == 4


def test_inference_tensors_are_forgotten_by_hand(made: list[QuantizedLinear]) -> None:
    with torch.inference_mode():
        parts, spec = make_parts()
        find_placed(parts, spec, BlackwellPlacer(torch.bfloat16))
        parts[8].zero_()
        forget_placed(parts)
        placed = find_placed(parts, spec, BlackwellPlacer(torch.bfloat16))
    assert placed.bias is not None
    assert not placed.bias.any()
    assert len(made) == 2


@pytest.mark.parametrize("k", [64, 72], ids=["codes_shared", "codes_copied"])
def test_a_placement_ends_with_its_weight(k: int) -> None:
    parts, spec = make_parts(k)
    reference = weakref.ref(find_placed(parts, spec, BlackwellPlacer(torch.bfloat16)))
    assert count_placed_bytes(parts) > 0
    assert reference() is not None
    del parts
    gc.collect()
    assert reference() is None


def test_counted_bytes_are_those_beside_the_parts() -> None:
    parts, spec = make_parts()
    assert count_placed_bytes(parts) == 0
    placed = find_placed(parts, spec, BlackwellPlacer(torch.bfloat16))
    assert placed.weight_codes.data_ptr() == parts[0].data_ptr()
    shared = parts[0].numel() + 4 * (24 + 64)  # codes; bias and smooth, float32 as they are
    assert count_placed_bytes(parts) == placed.num_bytes - shared
