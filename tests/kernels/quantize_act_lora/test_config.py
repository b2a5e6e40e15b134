"""Which configurations are legal, and which are chosen."""

import dataclasses
import itertools

import pytest

from halfbyte.errors import FormatError, UnsupportedHardwareError, UsageError
from halfbyte.formats.activation import ACTIVATION_FORMATS
from halfbyte.kernels.quantize_act_lora.config import (
    QuantizeConfig,
    QuantizeRequest,
    act_scale_shape,
    check_legal,
    choose_config,
    count_amax_ctas,
    estimate_cycles,
    find_target,
    padded_k,
    padded_rank,
)
from halfbyte.kernels.quantize_act_lora.source import make_source

TARGETS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
LEGAL = QuantizeConfig("nvfp4_nunchaku", "float16", "float16", "sm_100a")


def make_request(m: int, k: int, rank: int, target: str = "sm_100a") -> QuantizeRequest:
    return QuantizeRequest("nvfp4_dynamic", "bfloat16", m, k, rank, target, "bfloat16")


@pytest.mark.parametrize("target", TARGETS)
def test_every_request_has_a_legal_configuration(target: str) -> None:
    sizes = itertools.product((1, 17, 64, 300, 4352), (1, 100, 3840, 15360), (0, 1, 16, 128, 700))
    for m, k, rank in sizes:
        config = choose_config(make_request(m, k, rank, target))
        check_legal(config)
        assert config.rank_tile >= min(rank, 256)


@pytest.mark.parametrize("target", TARGETS)
def test_large_inputs_fill_the_gpu(target: str) -> None:
    request = make_request(4352, 3840, 128, target)
    config = choose_config(request)
    num_ctas = -(-4352 // config.rows) * config.cluster_k
    assert num_ctas >= 0.7 * find_target(target).num_sms
    # Tall tiles whose K nobody shares leave three quarters of the SMs idle.
    tall = dataclasses.replace(config, rows=128, cluster_k=1)
    assert estimate_cycles(request, tall) > 1.5 * estimate_cycles(request, config)


def test_few_rows_split_k_over_the_largest_cluster() -> None:
    config = choose_config(make_request(1, 3840, 128))
    assert (config.rows, config.cluster_k) == (16, 8)
    assert choose_config(make_request(1, 3840, 128, "sm_120a")).cluster_k == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 48}, "rows is 48, must be one of"),
        ({"rank_tile": 24}, "rank_tile is 24"),
        ({"stages": 1}, "stages is 1"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"target": "sm_120a", "cluster_k": 2}, "sm_120a has no clusters"),
        ({"rank_tile": 0, "cluster_k": 2}, "nothing is summed"),
        ({"rows": 128, "rank_tile": 256, "stages": 2}, "128 accumulators a thread, at most 64"),
        ({"rows": 128, "rank_tile": 128, "stages": 8}, "8 stages of 33024 B"),
    ],
)
def test_illegal_configurations_are_refused_with_the_reason(
    change: dict[str, object], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        make_source(dataclasses.replace(LEGAL, **change))  # type: ignore[arg-type]


def test_all_reasons_are_given_a_line_each() -> None:
    config = dataclasses.replace(LEGAL, target="sm_120a", rows=128, rank_tile=128, cluster_k=2)
    with pytest.raises(UsageError) as error:
        check_legal(dataclasses.replace(config, stages=4))
    assert len(str(error.value).splitlines()) == 3


def test_unknown_modes_and_targets_are_named() -> None:
    with pytest.raises(FormatError, match="'fp4'"):
        check_legal(dataclasses.replace(LEGAL, mode="fp4"))
    with pytest.raises(UnsupportedHardwareError, match="'sm_80'"):
        check_legal(dataclasses.replace(LEGAL, target="sm_80"))


def test_repr_holds_every_choice() -> None:
    for field in dataclasses.fields(QuantizeConfig):
        assert f"{field.name}=" in repr(LEGAL)
    assert make_source(LEGAL) != make_source(dataclasses.replace(LEGAL, use_pdl=True))


def test_padded_sizes() -> None:
    assert [padded_k(k) for k in (1, 32, 33)] == [32, 32, 64]
    assert [padded_rank(rank) for rank in (0, 1, 8, 9)] == [0, 8, 8, 16]
    shapes = {mode: act_scale_shape(mode, 130, 100) for mode in ACTIVATION_FORMATS}
    assert shapes["nvfp4_nunchaku"] == (256, 8)
    assert shapes["mxfp4"] == (256, 4)
    assert shapes["int4"] == (130, 2)
    assert count_amax_ctas(1, 1, "sm_100a") == 1
    assert count_amax_ctas(10**5, 10**4, "sm_100a") == 592


def test_the_modules_whose_text_decides_are_listed() -> None:
    import ast
    import importlib.util
    from pathlib import Path

    modules = set(make_source(LEGAL).modules)
    for name in modules:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("halfbyte"):
                assert node.module in modules | {
                    "halfbyte.errors",
                    "halfbyte.device.kernel_source",
                    "halfbyte.formats.scale_layout",
                }
