"""The demo's chart: accuracy of each row, and where in the model the error arises."""

import io
import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from halfbyte.bench.demo_result import AS_SHIPPED, DemoResult, DemoRow
from halfbyte.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ChartTheme:
    """Colours of one chart, as hex strings; `rows` by row name."""

    background: str
    text: str
    grid: str
    rows: dict[str, str]


# INT4 in orange, NVFP4 in blue; the plain variant is the weaker shade. Both hues stay apart under
# the common colour-vision deficiencies (Okabe and Ito's palette).
LIGHT_THEME = ChartTheme(
    background="#ffffff",
    text="#1f2328",
    grid="#d9dee3",
    rows={
        AS_SHIPPED: "#8a9199",
        "int4_plain": "#f2b98a",
        "int4_svdquant_r32": "#d9620b",
        "nvfp4_plain": "#8fc1e8",
        "nvfp4_svdquant_r32": "#0b66b0",
    },
)
DARK_THEME = ChartTheme(
    background="#161b22",
    text="#e6edf3",
    grid="#343b44",
    rows={
        AS_SHIPPED: "#8a9199",
        "int4_plain": "#a5683a",
        "int4_svdquant_r32": "#f58f3c",
        "nvfp4_plain": "#4a80ab",
        "nvfp4_svdquant_r32": "#58a9f0",
    },
)


def draw_chart(result: DemoResult, theme: ChartTheme = LIGHT_THEME) -> bytes:
    """Return the chart as PNG bytes, 1760 x 1280 pixels.

    Above: perplexity over the model as shipped, and KL in nats per token. Below: the median
    relative output error of the linears in each decoder layer.

    Raises MissingDependencyError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "matplotlib is not installed; run: pip install matplotlib"
        ) from error
    # A Figure without pyplot draws with Agg and touches no global state.
    figure = Figure(figsize=(11, 8), dpi=160, facecolor=theme.background)
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12, wspace=0.02, hspace=0.04)
    grid = figure.add_gridspec(2, 2, height_ratios=[5, 6])
    ratios = [(row, result.perplexity_ratio(row)) for row in result.rows]
    _draw_bars(
        figure.add_subplot(grid[0, 0]), ratios, "Perplexity over as shipped", "×{:.3f}", theme
    )
    divergences = [(row, row.accuracy.kl) for row in result.rows if row.name != AS_SHIPPED]
    title = "KL(as shipped || quantized), nats per token"
    _draw_bars(figure.add_subplot(grid[0, 1]), divergences, title, "{:.3f}", theme)
    _draw_layer_errors(figure.add_subplot(grid[1, :]), result, theme)
    _draw_title(figure, result, theme)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=theme.background)
    return buffer.getvalue()


def _draw_title(figure: "Figure", result: DemoResult, theme: ChartTheme) -> None:
    title = "SmolLM2-135M with 4-bit weights and activations in every block linear"
    figure.suptitle(
        "Quick check: the figures mean nothing" if result.settings.is_quick else title,
        color=theme.text,
        fontsize=13,
        fontweight="bold",
    )


def _draw_bars(
    axes: "Axes", values: list[tuple[DemoRow, float]], title: str, label: str, theme: ChartTheme
) -> None:
    names = [row.name for row, _ in values]
    # A model that broke has infinite perplexity: a bar to the edge, labelled as what it is.
    longest = max((value for _, value in values if math.isfinite(value)), default=1.0) or 1.0
    lengths = [value if math.isfinite(value) else 1.1 * longest for _, value in values]
    bars = axes.barh(names, lengths, color=[theme.rows[name] for name in names], height=0.62)
    axes.invert_yaxis()
    axes.bar_label(
        bars,
        labels=[label.format(value) for _, value in values],
        padding=4,
        color=theme.text,
        fontsize=9.5,
    )
    axes.set_xlim(0, 1.18 * max(longest, *lengths))
    _style(axes, title, theme)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    axes.spines["left"].set_visible(True)
    axes.tick_params(axis="y", length=0)


def _draw_layer_errors(axes: "Axes", result: DemoResult, theme: ChartTheme) -> None:
    for row in result.rows:
        errors = _median_error_by_depth(row)
        if errors:
            percent = [100 * error for error in errors.values()]
            axes.plot(
                list(errors),
                percent,
                color=theme.rows[row.name],
                label=row.name,
                linestyle="-" if "svdquant" in row.name else "--",
                linewidth=2,
                marker="o",
                markersize=3.5,
            )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("decoder layer", color=theme.text)
    axes.locator_params(axis="x", integer=True)
    _style(axes, "Relative output error of a layer's linears, median, in percent", theme)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    legend = axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False, fontsize=9.5
    )
    for text in legend.get_texts():
        text.set_color(theme.text)


def _median_error_by_depth(row: DemoRow) -> dict[int, float]:
    """Return the median relative error of the linears of each decoder layer, by layer index."""
    by_depth: dict[int, list[float]] = {}
    for layer in row.layers:
        depth = int(layer.name.split(".")[1])  # layers.<depth>.self_attn.q_proj
        by_depth.setdefault(depth, []).append(layer.relative_error)
    return {depth: median(errors) for depth, errors in sorted(by_depth.items())}


def _style(axes: "Axes", title: str, theme: ChartTheme) -> None:
    axes.set_title(title, loc="left", color=theme.text, fontsize=10.5, pad=8)
    axes.set_facecolor(theme.background)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.text, labelsize=9.5)
    for side, spine in axes.spines.items():
        spine.set_color(theme.grid)
        spine.set_visible(side == "bottom")
