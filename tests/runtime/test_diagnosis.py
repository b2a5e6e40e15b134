"""What the diagnosis says of GPUs that are not here."""

import types

import pytest

from halfbyte.runtime import diagnosis


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_target_has_the_suffix_of_its_architecture(
    capability: tuple[int, int], target: str
) -> None:
    assert diagnosis.make_target(capability) == target


def test_a_gpu_is_listed_with_its_target() -> None:
    properties = types.SimpleNamespace(
        name="NVIDIA B200", major=10, minor=0, total_memory=180 * 2**30
    )
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda index: properties,
    )
    torch = types.ModuleType("torch")
    torch.cuda = cuda  # type: ignore[attr-defined]
    assert diagnosis.find_gpus(torch) == [
        {"name": "NVIDIA B200", "capability": "10.0", "target": "sm_100a", "memory_gib": 180.0}
    ]
