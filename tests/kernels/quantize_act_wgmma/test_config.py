"""What is chosen and what is legal, without CuTe."""

import dataclasses

import pytest

from halfbyte.errors import FormatError, UsageError
from halfbyte.formats.activation import ACTIVATION_FORMATS
from halfbyte.kernels.quantize_act_wgmma.config import (
    GPU,
    TOKEN_MODES,
    WgmmaQuantizeConfig,
    WgmmaQuantizeRequest,
    check_legal,
    choose_config,
    count_rank_tiles,
    padded_k,
)
from halfbyte.kernels.quantize_act_wgmma.source import list_arguments, make_source

SIZES = [(1, 64, 0), (1, 3840, 128), (64, 15360, 128), (4352, 3840, 128), (9000, 10240, 300)]


@pytest.mark.parametrize("mode", [*TOKEN_MODES, *ACTIVATION_FORMATS])
@pytest.mark.parametrize(("m", "k", "rank"), SIZES)
def test_what_is_chosen_is_legal_and_reaches_all_columns(
    mode: str, m: int, k: int, rank: int
) -> None:
    config = choose_config(WgmmaQuantizeRequest(mode, "bfloat16", m, k, rank))
    check_legal(config)
    assert config.columns >= padded_k(k)
    assert (config.rank_tile > 0) == (rank > 0)
    assert config.shared_bytes <= GPU.shared_bytes_per_cta


def test_registers_of_all_roles_fit_into_what_a_cta_starts_with() -> None:
    config = choose_config(WgmmaQuantizeRequest("fp8", "bfloat16", 4352, 3840, 128))
    started = config.launch_registers * config.threads
    product = config.product_registers * config.product_threads
    assert product + config.quantize_registers * config.quantize_threads + 24 * 128 <= started


def test_few_rows_are_all_resident_at_once() -> None:
    config = choose_config(WgmmaQuantizeRequest("fp8", "bfloat16", 120, 3840, 128))
    clusters = GPU.count_resident_clusters(config.cluster_k) // count_rank_tiles(config, 128)
    assert config.tokens * clusters >= 120


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": 12}, "tokens is 12"),
        ({"tokens": 256}, "a product needs 154 registers a thread"),
        ({"cluster_k": 3}, "cluster_k is 3"),
        ({"stages": 8}, "shared memory"),
        ({"rank_tile": 48}, "rank_tile is 48"),
        ({"mode": "mxfp4", "shift": 0.5}, "shift is 0.5"),
    ],
)
def test_an_illegal_choice_is_named(change: dict[str, object], reason: str) -> None:
    config = dataclasses.replace(WgmmaQuantizeConfig("fp8", "bfloat16"), **change)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=reason):
        make_source(config)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises((FormatError, UsageError), match="nvfp5"):
        choose_config(WgmmaQuantizeRequest("nvfp5", "bfloat16", 1, 64, 0))


def test_arguments_follow_the_mode() -> None:
    fp8 = choose_config(WgmmaQuantizeRequest("fp8", "bfloat16", 16, 256, 32, has_smooth=False))
    assert list_arguments(fp8) == ("x", "lora_down", "act", "token_scale", "lora_act")
    int4 = choose_config(WgmmaQuantizeRequest("int4", "bfloat16", 16, 256, 0))
    assert list_arguments(int4) == ("x", "smooth", "act", "act_group_scale")
