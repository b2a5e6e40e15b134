"""The ops with what cannot work: every misuse is named, on the CPU and on the Blackwell kernels."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from halfbyte import ops
from halfbyte.errors import FormatError, UsageError
from halfbyte.kernels.gemm_w4a4.published_operands import convert_published_operands
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts
from tests.kernels.gemm_w4a4.published import make_published
from tests.random_linears import LinearShape, make_input, make_linear

MISSING = [*find_missing_parts(), *find_absent_packages()]
needs_virtual_gpu = pytest.mark.skipif(bool(MISSING), reason=f"needs {'; '.join(MISSING)}")
M, N, K = 5, 40, 64
BACKENDS = [
    "cpu",
    pytest.param("virtual-b200", marks=needs_virtual_gpu),
    pytest.param("virtual-h200", marks=needs_virtual_gpu),
]
Change = Callable[[torch.Tensor], torch.Tensor]


def make_arguments() -> tuple[torch.Tensor, list[torch.Tensor], str]:
    linear = make_linear(LinearShape(n=N, k=K, rank=8, dtype=torch.bfloat16))
    parts, spec = ops.list_parts(linear), ops.make_spec(linear).encode()
    return make_input(M, K, torch.bfloat16), parts, spec


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", range(4))
def test_an_activation_on_another_device_gives_no_unwritten_memory(
    index: int, backend: str
) -> None:
    x, parts, spec = make_arguments()
    act = list(ops.quantize_act_lora(x, parts, spec, backend))
    act[index] = act[index].to("meta")
    with pytest.raises(FormatError, match=r"is on (cpu|meta), .* on (cpu|meta): move them"):
        ops.gemm_w4a4(act, parts, spec, x.dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["codes", "scales", "lora_act"])
def test_a_sparse_activation_is_named(name: str, backend: str) -> None:
    x, parts, spec = make_arguments()
    act = list(ops.quantize_act_lora(x, parts, spec, backend))
    index = ("codes", "scales", "global_scale", "lora_act").index(name)
    act[index] = act[index].to_sparse()
    with pytest.raises(FormatError, match=rf"act {name}: a torch.sparse_coo .* to_dense"):
        ops.gemm_w4a4(act, parts, spec, x.dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_operands_are_named(backend: str) -> None:
    x, parts, spec = make_arguments()
    with pytest.raises(FormatError, match=r"x: a torch.sparse_coo tensor.* to_dense"):
        ops.w4a4_linear(x.to_sparse(), parts, spec, backend)
    for index in (0, 1, 6, 7, 8):
        given = list(parts)
        given[index] = given[index].to_sparse()
        with pytest.raises(FormatError, match=f"{ops.PART_NAMES[index]}: a torch.sparse_coo"):
            ops.w4a4_linear(x, given, spec, backend)


@needs_virtual_gpu
def test_codes_of_three_dimensions_are_named() -> None:
    x, parts, spec = make_arguments()
    act = list(ops.quantize_act_lora(x, parts, spec, "virtual-b200"))
    with pytest.raises(FormatError, match=r"act codes: shape \(1, 5, 32\), wanted \[M, K_pad/2\]"):
        ops.gemm_w4a4([act[0][None], *act[1:]], parts, spec, x.dtype, "virtual-b200")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [0, 8, 10])
def test_another_number_of_parts_is_told(count: int, backend: str, device: str) -> None:
    x, parts, spec = make_arguments()
    act = [part.to(device) for part in ops.quantize_act_lora(x, parts, spec, "cpu")]
    x, given = x.to(device), [part.to(device) for part in [*parts, parts[0]][:count]]
    calls: list[Callable[[], Any]] = [
        lambda: ops.w4a4_linear(x, given, spec, backend),
        lambda: ops.quantize_act_lora(x, given, spec, backend),
        lambda: ops.gemm_w4a4(act, given, spec, x.dtype, backend),
    ]
    for call in calls:
        with pytest.raises(FormatError, match=f"linear: {count} tensors, wanted 9"):
            call()


@pytest.mark.parametrize("columns", ["9" * 5000, "\u0666\u0664", "6\u00b2", "-1", ""])
def test_columns_that_are_no_number_are_named(columns: str) -> None:
    with pytest.raises(FormatError, match=r"linear spec .*wanted '<weight format>"):
        ops.decode_spec(f"nvfp4/nvfp4_nunchaku/{columns}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_pass_is_refused_with_the_fix(backend: str) -> None:
    x, parts, spec = make_arguments()
    y = ops.w4a4_linear(x.requires_grad_(), parts, spec, backend)
    with pytest.raises(UsageError, match=r"halfbyte::w4a4_linear has no backward pass.*no_grad"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["virtual-", "virtual-B200", "Virtual-b200", "virtual-b200 ", ""])
def test_backends_are_spelled_exactly(name: str) -> None:
    with pytest.raises(UsageError, match=f"backend {name!r} is unknown; choose one of auto"):
        ops.w4a4_linear(*make_arguments(), name)


@pytest.mark.parametrize("name", ["act", "ascales", "alpha"])
def test_published_operands_that_are_no_tensors_are_named(name: str) -> None:
    published = dataclasses.replace(make_published(), **{name: None})
    with pytest.raises(FormatError, match=f"{name}: got NoneType, wanted a"):
        convert_published_operands(published, torch.bfloat16)
