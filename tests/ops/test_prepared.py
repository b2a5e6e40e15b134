"""Prepared linears: the op's numbers from x as it is at each launch, and nothing bound by copy."""

from collections.abc import Iterator

import pytest
import torch

import halfbyte.virtual
from halfbyte import ops
from halfbyte.errors import FormatError, UsageError
from halfbyte.nn import W4A4Linear
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts
from tests.random_linears import LinearShape, make_input, make_linear

MISSING = [*find_missing_parts(), *find_absent_packages()]
needs_virtual_gpu = pytest.mark.skipif(bool(MISSING), reason=f"needs {'; '.join(MISSING)}")
M, N, K = 5, 40, 200


def make_module(
    mode: str = "fp8", n: int = N, activation: str | None = "nvfp4_nunchaku"
) -> W4A4Linear:
    shape = LinearShape(n=n, k=K, rank=20, dtype=torch.bfloat16)
    linear = make_linear(shape, ("nvfp4", activation))
    return W4A4Linear.from_record(linear, mode=mode)


@pytest.fixture(params=["h200", "b200"])
def gpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the name of a session's virtual GPU."""
    with halfbyte.virtual.cuda(request.param):
        yield request.param


@needs_virtual_gpu
@pytest.mark.parametrize("mode", ["auto", "bf16"])
def test_each_launch_reads_x_as_it_is(gpu: str, mode: str) -> None:
    module = make_module(mode).cuda()
    first, second = (make_input(M, K, torch.bfloat16, seed).cuda() for seed in (0, 1))
    wanted = [module(x).cpu() for x in (first, second)]
    x = first.clone()
    prepared = module.prepare(x)
    assert len(prepared.launches) == (0 if mode == "bf16" else 2)
    assert torch.equal(prepared.y.cpu(), wanted[0])
    for given, result in zip((first, second), wanted, strict=True):
        x.copy_(given)
        prepared.y.fill_(float("nan"))
        prepared.launch()
        assert torch.equal(prepared.y.cpu(), result)


@needs_virtual_gpu
def test_what_would_be_bound_by_copy_is_refused(gpu: str) -> None:
    x = make_input(M, 2 * K, torch.bfloat16).cuda()
    with pytest.raises(FormatError, match=r"strides \(400, 2\): a prepared launch reads x where"):
        make_module().cuda().prepare(x[:, ::2])
    with pytest.raises(FormatError, match=r"N = 41: .* wanted a multiple of 8"):
        make_module(n=41).cuda().prepare(x[:, :K])
    with pytest.raises(UsageError, match="weight-only layer in mode 'exact' takes operations of t"):
        make_module("exact", activation=None).cuda().prepare(x[:, :K])


def test_tensors_on_the_cpu_are_refused() -> None:
    module = make_module()
    parts, spec = ops.list_parts(module.to_record()), module.spec.encode()
    with pytest.raises(UsageError, match="prepared launches are for tensors on a GPU"):
        ops.prepare_linear(make_input(M, K, torch.bfloat16), parts, spec)
