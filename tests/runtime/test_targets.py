"""Which target a GPU gets, and what is said of every other and of wrong suffixes."""

import pytest

from halfbyte.errors import UnsupportedHardwareError, UsageError
from halfbyte.runtime.targets import check_target, choose_target, list_targets


@pytest.mark.parametrize(
    ("capability", "target"),
    [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120a")],
)
def test_each_gpu_gets_the_target_of_its_architecture(
    capability: tuple[int, int], target: str
) -> None:
    assert choose_target(capability, "some GPU") == target


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (10, 1), (12, 1), (13, 0)])
def test_another_gpu_is_refused_with_its_name_and_what_runs_instead(
    capability: tuple[int, int],
) -> None:
    with pytest.raises(UnsupportedHardwareError) as raised:
        choose_target(capability, "NVIDIA GB10\x1b[2J")
    message = str(raised.value)
    assert "NVIDIA GB10" in message
    assert f"{capability[0]}.{capability[1]}" in message
    assert "backend='cpu'" in message
    assert "\x1b" not in message


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("sm_120", "sm_120a"),
        ("sm_100f", "sm_100a"),
        ("sm_103f", "sm_103a"),
        ("sm_100", "sm_100a"),
        ("sm_90", "sm_90a"),
    ],
)
def test_a_wrong_suffix_is_named_with_the_right_target(given: str, right: str) -> None:
    with pytest.raises(UsageError, match=rf"suffix '[af]'.*{right}$"):
        check_target(given)


@pytest.mark.parametrize("given", ["sm_89", "sm_101a", "compute_100a", "", "sm_100a ", "SM_100A"])
def test_an_unknown_target_lists_those_there_are(given: str) -> None:
    with pytest.raises(UsageError, match="sm_100a, sm_103a, sm_90a, sm_120a"):
        check_target(given)


def test_a_list_keeps_its_order_and_drops_repeats() -> None:
    assert list_targets("sm_120a, sm_90a,sm_120a,") == ["sm_120a", "sm_90a"]
    with pytest.raises(UsageError, match="no target is named"):
        list_targets(" , ")
