"""The kernel bit by bit against the reference: on an H200, virtual where there is none."""

from typing import Any

import pytest
import torch

from halfbyte.formats.activation import ACTIVATION_FORMATS
from tests.kernels.quantize_act_lora import contents
from tests.kernels.quantize_act_lora.gpu_cases import CONTENTS
from tests.kernels.quantize_act_lora.quantize_runs import (
    LORA_ACT_SCALE,
    Operands,
    Shape,
    make_operands,
    pad_rows,
)
from tests.kernels.quantize_act_wgmma.quantize_runs import (
    CompileSource,
    check_call,
    make_noise,
)

TOKEN_MODES = ("fp8", "int8")
MODES = (*TOKEN_MODES, *ACTIVATION_FORMATS)
HALVES = ("float16", "bfloat16")
SHAPES = (
    Shape(1, 64, 8),
    Shape(3, 48, 16),
    Shape(17, 104, 24),
    Shape(130, 1000, 33),
    Shape(257, 96, 64),
    Shape(128, 256, 0),
    Shape(5, 1, 1),
    Shape(200, 640, 130),
)
# Each mode meets two shapes, one with each dtype.
PAIRS = [
    (mode, HALVES[(index + number) % 2], SHAPES[(3 * index + 4 * number) % len(SHAPES)])
    for number in range(2)
    for index, mode in enumerate(MODES)
]


@pytest.fixture(autouse=True)
def nothing_found(h200: Any) -> Any:
    """Fail a test whose launches have findings, notes included."""
    yield
    assert [str(one) for record in h200.log for one in record.findings] == []


@pytest.mark.parametrize(("mode", "dtype", "shape"), PAIRS, ids=str)
def test_same_values_as_the_reference(
    compile_source: CompileSource, mode: str, dtype: str, shape: Shape
) -> None:
    check_call(compile_source, make_operands(shape, dtype), mode)


@pytest.mark.parametrize("mode", TOKEN_MODES)
def test_rows_of_all_sizes_have_their_own_scale(compile_source: CompileSource, mode: str) -> None:
    x = make_noise(150, 300, "bfloat16")
    x[7] = 0.0
    x[8] = -0.0
    x[9, 5] = 448.0
    x[9, 6:] = 1.0
    x[10] = 2.0**-120
    x[11] = 2.0**-133
    x[12, 7] = float("nan")
    x[13, -1] = float("inf")
    x[14] = 3.0e38
    check_call(compile_source, Operands(pad_rows(x), None, None), mode)


@pytest.mark.parametrize("mode", TOKEN_MODES)
@pytest.mark.parametrize("shift", [0.171875])
def test_a_shift_is_added_before_smoothing_and_not_to_padding(
    compile_source: CompileSource, mode: str, shift: float
) -> None:
    check_call(compile_source, make_operands(Shape(20, 200, 8), "bfloat16"), mode, shift)


@pytest.mark.parametrize(
    ("mode", "content"),
    [
        ("nvfp4_dynamic", "extremes"),
        ("int4", "spoilt"),
        ("nvfp4_nunchaku", "magnitudes"),
        ("fp8", "magnitudes"),
        ("int8", "spoilt"),
    ],
)
def test_hard_contents(compile_source: CompileSource, mode: str, content: str) -> None:
    check_call(compile_source, CONTENTS[content]("bfloat16"), mode)


@pytest.mark.long
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("mode", MODES)
def test_all_hard_contents(
    compile_source: CompileSource, mode: str, content: str, dtype: str
) -> None:
    if mode in TOKEN_MODES and content == "extreme_smooth":
        pytest.skip("1 / smooth of this content is no number")
    check_call(compile_source, CONTENTS[content](dtype), mode)


def test_every_float16_becomes_the_nearest_e2m1(compile_source: CompileSource) -> None:
    check_call(compile_source, contents.make_every_float16(), "nvfp4_one_level")


@pytest.mark.parametrize("mode", ["fp8", "nvfp4_nunchaku"])
@pytest.mark.parametrize(("offset", "pitch"), [(0, 101), (3, 104), (1, 100)])
def test_rows_of_x_may_start_anywhere(
    compile_source: CompileSource, mode: str, offset: int, pitch: int
) -> None:
    operands = make_operands(Shape(19, 100, 8), "float16")
    storage = torch.full((20 * pitch,), float("nan"), dtype=torch.float16)
    x = torch.as_strided(storage, (19, 100), (pitch, 1), offset)
    x.copy_(operands.x)
    check_call(compile_source, Operands(x, operands.smooth, operands.lora_down), mode)


@pytest.mark.parametrize("cluster_k", [1, 2, 4, 8])
@pytest.mark.parametrize("mode", ["fp8", "mxfp4"])
def test_any_cluster_gives_the_same_values(
    compile_source: CompileSource, mode: str, cluster_k: int
) -> None:
    operands = make_operands(Shape(140, 500, 40), "bfloat16")
    choices = {"cluster_k": cluster_k, "rank_tile": 32, "tokens": 24, "stages": 2}
    check_call(compile_source, operands, mode, **choices)


@pytest.mark.parametrize("threads", [(256, 1, 2), (512, 2, 1), (512, 1, 1), (512, 1, 2)])
def test_threads_share_rows_in_any_way(
    compile_source: CompileSource, threads: tuple[int, int, int]
) -> None:
    operands = make_operands(Shape(70, 300, 20), "float16")
    names = ("quantize_threads", "row_groups", "rows_at_once")
    choices = dict(zip(names, threads, strict=True))
    check_call(compile_source, operands, "fp8", cluster_k=1, tokens=40, units=1, **choices)


@pytest.mark.parametrize(("mode", "tokens"), [("fp8", 72), ("int8", 136), ("nvfp4_nunchaku", 136)])
def test_a_large_tile(compile_source: CompileSource, mode: str, tokens: int) -> None:
    operands = make_operands(Shape(300, 3840, 128), "bfloat16")
    choices = {"cluster_k": 2, "rank_tile": 128, "tokens": tokens, "stages": 3}
    check_call(compile_source, operands, mode, **choices)


@pytest.mark.parametrize("k", [4200, 9000, 15000])
@pytest.mark.parametrize("mode", ["fp8", "int4"])
def test_long_rows_take_several_units(compile_source: CompileSource, mode: str, k: int) -> None:
    check_call(compile_source, make_operands(Shape(11, k, 20), "bfloat16"), mode)


def test_integers_are_summed_exactly(compile_source: CompileSource) -> None:
    operands = contents.make_integers(70, 600, 40, "float16")
    choices = {"cluster_k": 4, "rank_tile": 64, "tokens": 40, "stages": 2}
    result = check_call(compile_source, operands, "fp8", **choices)
    assert operands.lora_down is not None
    assert result.lora_act is not None
    assert result.token_scale is not None
    exact = operands.x.double() @ operands.lora_down.double().T * LORA_ACT_SCALE
    scaled = result.lora_act[:, :40].double() * result.token_scale.double()[:, None]
    torch.testing.assert_close(scaled, exact, rtol=0, atol=0)
