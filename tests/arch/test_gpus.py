"""The table of GPUs is consistent with itself and found by name."""

import pytest

from halfbyte.arch import GPUS, find_gpu
from halfbyte.errors import UsageError


@pytest.mark.parametrize("name", GPUS)
def test_record_is_consistent(name: str) -> None:
    gpu = GPUS[name]
    assert gpu.name == name
    assert gpu.target == f"sm_{gpu.number}a"
    assert gpu.shared_bytes_per_cta + gpu.reserved_shared_bytes == gpu.shared_bytes_per_sm
    assert (gpu.tensor_memory_columns == 512) == (gpu.number in (100, 103))
    assert gpu.max_threads_per_cta <= gpu.max_warps_per_sm * gpu.warp_size


def test_names_are_found_in_any_case() -> None:
    assert find_gpu("B200") is GPUS["b200"]


def test_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(UsageError, match="b200, b300, h200, rtx5090"):
        find_gpu("b100")
