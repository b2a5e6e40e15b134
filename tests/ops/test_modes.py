"""Modes state an accuracy: names are checked, bf16 is torch's product, others are one kernel."""

import dataclasses

import numpy as np
import pytest
import torch

from halfbyte import ops
from halfbyte.errors import UnsupportedHardwareError, UsageError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.ops import placed_linears
from halfbyte.ops.dense import DensePlacer
from halfbyte.ops.placed_linears import count_placed_bytes, find_placed
from tests.formats.test_dense_linear import multiply_in_float64
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id
from tests.tolerance import measure_error

M, N, K = 33, 40, 200


def arguments_of(linear: QuantizedLinear) -> tuple[list[torch.Tensor], str]:
    return ops.list_parts(linear), ops.make_spec(linear).encode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_bf16_is_the_layer_with_its_x_as_it_is(
    pair: tuple[str, str | None], dtype: torch.dtype
) -> None:
    linear = make_linear(LinearShape(N, K, dtype=dtype), pair)
    x = make_input(M, K, dtype)
    y = ops.w4a4_linear(x, *arguments_of(linear), "cpu", "none", "bf16")
    wanted = multiply_in_float64(x.double().numpy(), linear)
    weight = multiply_in_float64(np.eye(K), linear) - multiply_in_float64(np.zeros((1, K)), linear)
    in_torch = x @ torch.as_tensor(weight).to(dtype)
    in_torch += torch.as_tensor(multiply_in_float64(np.zeros((1, K)), linear)).to(dtype)
    assert y.dtype == dtype
    assert measure_error(y, wanted) <= 2 * measure_error(in_torch, wanted)


@pytest.mark.parametrize("mode", ["auto", "exact", "fp8", "int8"])
def test_the_cpu_backend_has_one_kernel_for_the_other_modes(mode: str) -> None:
    arguments = arguments_of(make_linear(LinearShape(N, K)))
    x = make_input(M, K)
    wanted = ops.w4a4_linear(x, *arguments)
    assert torch.equal(ops.w4a4_linear(x, *arguments, "cpu", "none", mode), wanted)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_modes_are_checked_by_every_op(device: str) -> None:
    linear = make_linear(LinearShape(N, K, dtype=torch.bfloat16))
    parts, spec = arguments_of(linear)
    x = make_input(M, K, torch.bfloat16)
    act = list(ops.quantize_act_lora(x, parts, spec))
    x, parts, act = x.to(device), [p.to(device) for p in parts], [a.to(device) for a in act]
    message = "mode 'fp4' is unknown; choose one of auto, exact, fp8, int8, bf16"
    with pytest.raises(UsageError, match=message):
        ops.w4a4_linear(x, parts, spec, "auto", "none", "fp4")
    with pytest.raises(UsageError, match=message):
        ops.quantize_act_lora(x, parts, spec, "auto", "fp4")
    with pytest.raises(UsageError, match=message):
        ops.gemm_w4a4(act, parts, spec, x.dtype, "auto", "none", "fp4")


def test_bf16_refuses_what_needs_sums_in_float32() -> None:
    arguments = arguments_of(make_linear(LinearShape(N, K)))
    x = make_input(M, K)
    with pytest.raises(UnsupportedHardwareError, match=r"'silu': mode 'bf16' writes y .*on y"):
        ops.w4a4_linear(x, *arguments, "cpu", "silu", "bf16")


def test_dense_weights_are_kept_counted_and_made_again() -> None:
    linear = make_linear(LinearShape(N, K, dtype=torch.bfloat16))
    parts, spec = arguments_of(linear)
    x = make_input(M, K, torch.bfloat16)
    first = ops.w4a4_linear(x, parts, spec, "cpu", "none", "bf16")
    assert count_placed_bytes(parts) == 2 * (N * K + N)
    kept = find_placed(parts, ops.decode_spec(spec), DensePlacer(torch.bfloat16))
    assert find_placed(parts, ops.decode_spec(spec), DensePlacer(torch.bfloat16)) is kept
    parts[7].mul_(2)
    second = ops.w4a4_linear(x, parts, spec, "cpu", "none", "bf16")
    doubled = dataclasses.replace(linear, lora_up=parts[7])
    assert not torch.equal(first, second)
    assert torch.equal(second, ops.w4a4_linear(x, *arguments_of(doubled), "cpu", "none", "bf16"))
    assert count_placed_bytes(parts) == 2 * (N * K + N)


@pytest.mark.parametrize("size", [(0, 40, 64), (3, 0, 64), (3, 40, 0)], ids=["m0", "n0", "k0"])
def test_empty_dense_products(size: tuple[int, int, int]) -> None:
    m, n, k = size
    linear = make_linear(LinearShape(n=n, k=k, rank=5))
    y = ops.w4a4_linear(make_input(m, k), *arguments_of(linear), "cpu", "none", "bf16")
    assert tuple(y.shape) == (m, n)
    if k == 0:
        assert linear.bias is not None
        assert torch.equal(y, linear.bias.expand(m, n))


def test_another_low_rank_branch_keeps_every_placed_weight() -> None:
    parts, spec = arguments_of(make_linear(LinearShape(N, K)))
    made: list[str] = []

    @dataclasses.dataclass(frozen=True)
    class Placed:
        num_bytes: int = 7
        shared_bytes: int = 2

    @dataclasses.dataclass(frozen=True)
    class Noting:
        name: str

        def place(self, linear: QuantizedLinear) -> Placed:
            if self.name == "refuses":
                made.append(self.name)
                raise UnsupportedHardwareError("these values fit no such kernel")
            made.append(f"place {self.name}")
            return Placed()

        def replace_low_rank(self, placed: Placed, linear: QuantizedLinear) -> Placed:
            made.append(f"replace {self.name}")
            return placed

    first, second, refusing = Noting("first"), Noting("second"), Noting("refuses")
    parsed = ops.decode_spec(spec)
    for placer in (first, second):
        find_placed(parts, parsed, placer)
    for _ in range(2):
        with pytest.raises(UnsupportedHardwareError, match="these values fit no such kernel"):
            find_placed(parts, parsed, refusing)
    assert count_placed_bytes(parts) == 10
    for _ in range(2):
        parts[6] = parts[6] * 2
        find_placed(parts, parsed, first)
    assert count_placed_bytes(parts) == 10
    find_placed(parts, parsed, second)
    assert made == [
        "place first", "place second", "refuses", "replace first", "replace first", "replace second"
    ]  # fmt: skip
    placed_linears.forget_placed(parts)
    assert count_placed_bytes(parts) == 0
