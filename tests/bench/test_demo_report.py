import io
import json
import re
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

from halfbyte.bench.demo_report import make_record, write_report
from halfbyte.errors import HalfbyteError
from tests.bench.demo_results import make_result

pytestmark = pytest.mark.skipif(
    find_spec("matplotlib") is None, reason="pip install matplotlib (the `demo` extra)"
)

ROW_NAMES = ["as_shipped", "int4_plain", "int4_svdquant_r32", "nvfp4_plain", "nvfp4_svdquant_r32"]


class PageReader(HTMLParser):
    """Collects tags that open and close, attributes that load something, and the text."""

    VOID = ("meta", "img", "source", "link", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self.layer_rows = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = dict(attributes)
        self.loads += [names[key] or "" for key in ("src", "srcset", "href") if key in names]
        self.layer_rows += "data-preset" in names
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "made" / "here"
    assert [path.name for path in write_report(make_result(), folder)] == [
        "demo.json",
        "demo.html",
        "demo.png",
    ]
    return folder


def test_json_has_the_rows_with_their_figures(folder: Path) -> None:
    record = json.loads((folder / "demo.json").read_text())
    assert [row["name"] for row in record["rows"]] == ROW_NAMES
    for row in record["rows"]:
        assert {"perplexity", "kl", "top1", "bytes", "bits_per_weight", "layers"} <= set(row)
    assert record["rows"][2]["perplexity_ratio"] == 20.0 / 16.0
    assert record["rows"][0]["bits_per_weight"] == 1000 * 8 / 1600
    assert record["slices"]["evaluation"]["tokens"] == 2048
    assert len(record["slices"]["spare"]["sha256"]) == 64
    assert record["is_quick"] is False


def test_json_holds_no_infinity(folder: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads((folder / "demo.json").read_text(), parse_constant=refuse)
    assert record["rows"][1]["perplexity"] is None  # it was infinite
    assert record["rows"][1]["perplexity_ratio"] is None


def test_page_is_well_formed_and_loads_nothing_from_elsewhere(folder: Path) -> None:
    page = (folder / "demo.html").read_text()
    reader = PageReader()
    reader.feed(page)
    assert reader.open == []
    assert all(load.startswith("data:image/png;base64,") for load in reader.loads)
    assert len(reader.loads) == 2  # a light and a dark chart
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttp", page.split("base64,")[0])
    script = page[page.index("<script>") :]
    assert not re.search(r"https?:|fetch\(|import\(|XMLHttp", script)
    assert "<b>angle" not in page


def test_page_has_every_row_and_every_linear_of_every_quantized_row(folder: Path) -> None:
    reader = PageReader()
    reader.feed((folder / "demo.html").read_text())
    assert all(name in reader.text for name in ROW_NAMES)
    assert reader.layer_rows == 4 * 2
    text = " ".join(reader.text)
    assert make_result().slices.sha256["calibration"] in text
    assert "peak memory 1.50 GB" in text


def test_chart_is_a_picture_with_content(folder: Path) -> None:
    from matplotlib.image import imread

    pixels = imread(io.BytesIO((folder / "demo.png").read_bytes()), format="png")
    assert pixels.shape[:2] == (1280, 1760)
    colours = {tuple(colour) for colour in pixels[::4, ::4, :3].reshape(-1, 3).tolist()}
    assert len(colours) > 20


def test_quick_result_says_that_its_figures_mean_nothing() -> None:
    from halfbyte.bench.demo_page import make_page

    result = make_result(is_quick=True)
    assert "figures mean nothing" in make_page(result)
    assert "figures mean nothing" not in make_page(make_result())
    assert make_record(result)["is_quick"] is True


def test_failed_write_keeps_the_old_file_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo.json").write_text("old")

    def fail(source: object, target: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises((OSError, HalfbyteError), match="no space"):
        write_report(make_result(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]
    assert (tmp_path / "demo.json").read_text() == "old"
