"""W4A4Linear: numbers for any shape, dtype and stride, and errors that name what was wrong."""

import copy
import dataclasses
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfbyte.errors import FormatError, UsageError
from halfbyte.nn.w4a4_linear import W4A4Linear
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id
from tests.tolerance import assert_close_to_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_module(x: torch.Tensor, module: W4A4Linear) -> None:
    """Assert shape, dtype and numbers of module(x) against the float64 truth."""
    y = module(x)
    assert tuple(y.shape) == (*x.shape[:-1], module.out_features)
    assert y.is_contiguous()
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1]))
    y = y.reshape(len(rows), module.out_features)
    assert_close_to_reference(y, rows, module.to_record())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_any_leading_dimensions(pair: tuple[str, str | None], dtype: torch.dtype) -> None:
    module = W4A4Linear.from_record(make_linear(LinearShape(n=20, k=96), pair), dtype=dtype)
    x = make_input(24, 96, dtype)
    check_module(x[0], module)
    check_module(x, module)
    check_module(x.reshape(2, 3, 4, 96), module)
    check_module(x[:1].expand(4, 96), module)  # batch of stride 0
    check_module(x[:6].reshape(1, 6, 96).expand(4, 6, 96), module)
    check_module(x[:0], module)
    check_module(x.new_empty((2, 0, 3, 96)), module)


def test_leading_dimensions_do_not_change_a_bit() -> None:
    module = W4A4Linear(make_linear(LinearShape(n=20, k=96)))
    x = make_input(12, 96)
    assert torch.equal(module(x.reshape(2, 3, 2, 96)), module(x).reshape(2, 3, 2, 20))
    assert torch.equal(module(x[0]), module(x[:1])[0])
    assert torch.equal(module(x[:1].expand(4, 96)), module(x[:1].repeat(4, 1)))


@pytest.mark.parametrize("rank", [0, 16, 24, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", [FORMAT_PAIRS[0], FORMAT_PAIRS[5], FORMAT_PAIRS[7]], ids=pair_id)
def test_any_rank(pair: tuple[str, str | None], dtype: torch.dtype, rank: int) -> None:
    linear = make_linear(LinearShape(n=40, k=96, rank=rank, dtype=dtype), pair)
    module = W4A4Linear(linear)
    assert module.rank == rank
    check_module(make_input(7, 96, dtype), module)


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_columns_that_are_no_multiple_of_the_block(pair: tuple[str, str | None]) -> None:
    # 3420 = 213 * 16 + 12: padded to 3424 inside, 3456 with blocks of 64
    check_module(make_input(24, 3420), W4A4Linear(make_linear(LinearShape(n=64, k=3420), pair)))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    k=st.integers(1, 150),
    m=st.integers(0, 9),
    rank=st.integers(0, 20),
    parts=st.booleans(),
    pair=st.sampled_from(FORMAT_PAIRS),
    dtype=st.sampled_from(DTYPES),
)
def test_any_small_shape(
    n: int, k: int, m: int, rank: int, parts: bool, pair: tuple[str, str | None], dtype: torch.dtype
) -> None:
    shape = LinearShape(n=n, k=k, rank=rank, parts=parts, dtype=dtype)
    check_module(make_input(m, k, dtype), W4A4Linear(make_linear(shape, pair)))


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_no_columns_give_the_bias(pair: tuple[str, str | None]) -> None:
    module = W4A4Linear(make_linear(LinearShape(n=6, k=0), pair))
    assert module.rank == 0
    assert module.bias is not None
    assert torch.equal(module(torch.empty(5, 0)), module.bias.expand(5, 6))
    bare = W4A4Linear(make_linear(LinearShape(n=6, k=0, rank=0, parts=False), pair))
    assert torch.equal(bare(torch.empty(2, 5, 0)), torch.zeros(2, 5, 6))


def test_no_output_features_give_no_columns() -> None:
    module = W4A4Linear(make_linear(LinearShape(n=0, k=64)))
    assert module(make_input(5, 64)).shape == (5, 0)


def poison_freed_memory(byte: int) -> None:
    """Fill and free blocks of many sizes, so that the next allocations find `byte` in them."""
    blocks = [torch.full((1 << size,), byte, dtype=torch.uint8) for size in range(6, 19)] * 4
    blocks += [torch.full((1 << size,), byte, dtype=torch.uint8) for size in range(6, 18)]
    del blocks
    gc.collect()


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_result_does_not_depend_on_what_padding_memory_held(
    pair: tuple[str, str | None],
) -> None:
    # 3696 = 231 * 16: 231 scale columns, which hardware layouts pad to 232
    module = W4A4Linear(make_linear(LinearShape(n=8, k=3696), pair))
    wide = make_input(5, 3700, torch.bfloat16)
    results = []
    for byte, beside in ((0x7F, float("nan")), (0x00, 0.0), (0xFF, 1e30)):
        wide[:, 3696:] = beside
        poison_freed_memory(byte)
        results.append(module(wide[:, :3696]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_result_is_the_same_with_uninitialised_tensors_filled_with_nan(
    pair: tuple[str, str | None],
) -> None:
    module = W4A4Linear(make_linear(LinearShape(n=20, k=100), pair))
    x = make_input(5, 100)
    plain = module(x)
    # torch.empty then returns NaN and the largest integers
    torch.use_deterministic_algorithms(True)
    try:
        filled = module(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(plain, filled)
    assert torch.isfinite(filled).all()


def test_repeated_calls_give_the_same_bits() -> None:
    module = W4A4Linear(make_linear(LinearShape(n=64, k=512), FORMAT_PAIRS[0]))
    x = make_input(33, 512, torch.bfloat16)
    first = module(x)
    assert all(torch.equal(first, module(x)) for _ in range(5))


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part_dtype", DTYPES, ids=str)
def test_x_may_have_another_dtype_than_the_parts(
    part_dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    module = W4A4Linear(make_linear(LinearShape(n=20, k=96, dtype=part_dtype)))
    y = module(make_input(4, 96, x_dtype))
    assert y.dtype == x_dtype
    # x is exact in float32 and every part is read in float32: only the last rounding differs
    assert torch.equal(y, module(make_input(4, 96, x_dtype).float()).to(x_dtype))


def test_from_record_converts_parts_once() -> None:
    record = make_linear(LinearShape(n=20, k=96, dtype=torch.bfloat16))
    record = dataclasses.replace(record, bias=torch.randn(20))
    module = W4A4Linear.from_record(record, dtype=torch.float16)
    for name in ("smooth", "lora_down", "lora_up", "bias"):
        assert getattr(module, name).dtype == torch.float16
    assert module.channel_scale.dtype == torch.float32
    check_module(make_input(4, 96, torch.float16), module)


def test_from_record_refuses_what_does_not_fit() -> None:
    record = make_linear(LinearShape(n=20, k=96))
    with pytest.raises(FormatError, match=r"dtype: dtype torch\.int8"):
        W4A4Linear.from_record(record, dtype=torch.int8)
    large = dataclasses.replace(record, bias=torch.full((20,), 1e6))
    with pytest.raises(FormatError, match=r"bias: torch.float32 up to 1e\+06 .* torch.float16"):
        W4A4Linear.from_record(large, dtype=torch.float16)
    tiny = dataclasses.replace(record, smooth=torch.full((96,), 1e-9))
    with pytest.raises(FormatError, match=r"smooth \(torch.float16\)"):
        W4A4Linear.from_record(tiny, dtype=torch.float16)
    with pytest.raises(FormatError, match=r"smooth \(torch.float32\)"):
        W4A4Linear(dataclasses.replace(record, smooth=torch.zeros(96)))


def test_module_owns_its_tensors() -> None:
    record = make_linear(LinearShape(n=20, k=96))
    module = W4A4Linear(record)
    x = make_input(3, 96)
    before = module(x)
    record.weight.data.fill_(0x77)
    assert record.lora_down is not None
    record.lora_down.zero_()
    assert torch.equal(module(x), before)


@pytest.mark.parametrize("shape", [(3, 95), (97,), (2, 3, 100), ()])
def test_wrong_last_dimension_names_wanted_and_got(shape: tuple[int, ...]) -> None:
    module = W4A4Linear(make_linear(LinearShape(n=20, k=96)))
    with pytest.raises(FormatError, match=r"x: shape .*, wanted \[\.\.\., 96\]"):
        module(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.bool])
def test_wrong_input_dtype_is_named(dtype: torch.dtype) -> None:
    module = W4A4Linear(make_linear(LinearShape(n=20, k=96)))
    with pytest.raises(FormatError, match=f"x: dtype {dtype}"):
        module(torch.zeros((2, 96), dtype=dtype))


def test_extra_repr_tells_sizes_formats_and_bytes() -> None:
    module = W4A4Linear(make_linear(LinearShape(n=20, k=96, rank=16)))
    # codes 20*48, scales 20*6, global 4, channel 80, smooth 384, down 6144, up 1280, bias 80
    assert repr(module) == (
        "W4A4Linear(in_features=96, out_features=20, bias=True, weight=nvfp4, "
        "activation=nvfp4_nunchaku, rank=16, dtype=torch.float32, bytes=9052)"
    )


def test_module_works_inside_a_model_like_nn_linear() -> None:
    linear = W4A4Linear(make_linear(LinearShape(n=20, k=96)))
    model = nn.Sequential(linear, nn.GELU(), nn.Linear(20, 3))
    with torch.inference_mode():
        assert model(make_input(4, 96)).shape == (4, 3)
    assert (linear.in_features, linear.out_features) == (96, 20)
    assert list(linear.parameters()) == []


def test_deepcopy_is_independent() -> None:
    module = W4A4Linear(make_linear(LinearShape(n=20, k=96)))
    twin = copy.deepcopy(module)
    x = make_input(3, 96)
    before = module(x)
    assert torch.equal(twin(x), before)
    twin.weight_data.fill_(0)
    assert torch.equal(module(x), before)


def test_backward_is_refused_not_silently_wrong() -> None:
    module = W4A4Linear(make_linear(LinearShape(n=20, k=96)))
    y = module(make_input(3, 96).requires_grad_())
    with pytest.raises(UsageError, match="w4a4_linear"):
        y.sum().backward()
