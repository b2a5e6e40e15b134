"""Presets are checked records."""

from typing import Any

import pytest

from halfbyte.errors import FormatError
from halfbyte.svdquant.presets import PRESETS, SVDQuantPreset, get_preset


def test_every_number_format_has_a_plain_a_svdquant_and_a_weight_only_preset() -> None:
    assert list(PRESETS) == [
        f"{number}_{kind}"
        for number in ("nvfp4", "int4", "mxfp4")
        for kind in ("plain", "svdquant_r32", "weight_only_r32")
    ]


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(FormatError, match="'nvfp5_plain' is unknown; use one of: nvfp4_plain"):
        get_preset("nvfp5_plain")


@pytest.mark.parametrize(
    "setting",
    [
        {"rank": -1},
        {"smoothing_points": -2},
        {"refinements": -1},
        {"rounding": "stochastic"},
        {"gram_shrinkage": 1.5},
        {"damping": float("nan")},
        {"damping": -0.1},
        {"low_rank_dtype": "float64"},
    ],
    ids=str,
)
def test_setting_out_of_range_is_refused_by_name(setting: dict[str, Any]) -> None:
    fields = {"name": "mine", "weight_format": "nvfp4", "activation": None, "rank": 4, **setting}
    with pytest.raises(FormatError, match=f"'mine': {next(iter(setting))}="):
        SVDQuantPreset(**fields)


def test_formats_that_cannot_hold_a_weight_are_refused() -> None:
    with pytest.raises(FormatError, match="weight_format='uint4'"):
        SVDQuantPreset("mine", "uint4", None, rank=0)
    with pytest.raises(FormatError, match="rounding='gptq' is not possible with mxfp8_e4m3"):
        SVDQuantPreset("mine", "mxfp8_e4m3", None, rank=0, rounding="gptq")
    with pytest.raises(FormatError, match="'nvfp5' is unknown"):
        SVDQuantPreset("mine", "nvfp5", None, rank=0)
    with pytest.raises(FormatError, match="'int5' is unknown"):
        SVDQuantPreset("mine", "int4", "int5", rank=0)
