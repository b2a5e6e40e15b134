"""What the doctor says of GPU kernels: written, built, compiled here, or missing."""

from pathlib import Path

import pytest

from halfbyte.device.kernel_source import KernelSource
from halfbyte.runtime import diagnosis, kernel_availability, shipped_kernels
from halfbyte.runtime.artifact import build_artifacts, use_artifacts
from halfbyte.runtime.kernel_availability import describe_compiler, describe_target
from tests.runtime.scaled_sum import ScaledSumConfig, make_source


@pytest.fixture(autouse=True)
def tiny_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ship one tiny kernel, written for sm_100a."""

    def list_sources(target: str) -> list[KernelSource]:
        return [make_source(ScaledSumConfig(2.0))] if target == "sm_100a" else []

    monkeypatch.setattr(shipped_kernels, "_LISTS", {"scaled_sum": list_sources})
    monkeypatch.setattr(kernel_availability, "LINEARS", (("scaled_sum",), ("scaled_sum", "other")))


def test_a_gpu_that_is_here_runs_what_is_compiled(cache: Path) -> None:
    assert describe_target("sm_100a", "b200", {"sm_100a"}) == (
        "yes",
        "sm_100a, compiled when first used",
    )


def test_a_gpu_that_is_not_here_is_said_with_its_virtual_one(cache: Path) -> None:
    state, detail = describe_target("sm_100a", "b200", {"sm_90a"})
    assert state == "no"
    assert "backend='virtual-b200'" in detail


def test_a_kernel_that_is_not_written_is_named(cache: Path) -> None:
    assert describe_target("sm_90a", "h200", {"sm_90a"}) == (
        "not in this version",
        "scaled_sum is not written for sm_90a",
    )


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a", "sm_90a"])
def test_the_linear_of_these_targets_is_whole(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert kernel_availability.find_supply(target).missing == ()


def test_a_target_with_a_quantizer_alone_lacks_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert kernel_availability.find_supply("sm_120a").missing == ("gemm_w4a4",)


def test_artifacts_serve_without_the_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_artifacts([make_source(ScaledSumConfig(2.0))], tmp_path / "artifacts")
    monkeypatch.setattr(kernel_availability, "read_toolchain", lambda: None)
    assert describe_target("sm_100a", "b200", {"sm_100a"})[0] == "no"
    assert describe_compiler()[0] == "no"
    use_artifacts(tmp_path / "artifacts")
    assert describe_target("sm_100a", "b200", {"sm_100a"}) == (
        "yes",
        "sm_100a, 1 of 1 from artifacts",
    )


def test_a_wrong_artifact_folder_is_told(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFBYTE_ARTIFACTS", str(tmp_path / "absent"))
    state, detail = describe_target("sm_100a", "b200", {"sm_100a"})
    assert state == "no"
    assert "absent" in detail


def test_the_compiler_is_told_with_its_version_and_cache(cache: Path) -> None:
    state, detail = describe_compiler()
    assert state == "yes"
    assert "CuTe DSL 4." in detail
    assert str(cache) in detail


def test_a_kernel_package_that_breaks_does_not_end_the_diagnosis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_availability, "describe_target", lambda *_: 1 / 0)
    features = diagnosis.list_kernel_features(True, set())
    assert {feature.state for feature in features} == {"no"}
    assert all("division by zero" in feature.detail for feature in features)
