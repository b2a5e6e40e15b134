"""The linears of a speed run as bars: how many times faster than cuBLAS in 16 bits."""

from pathlib import Path

from halfbyte.bench.speed.result import SpeedResult

_BASELINE = "cublas"


def write_plot(result: SpeedResult, path: Path) -> bool:
    """Write a PNG and return True; False where no shape was timed with cuBLAS beside it."""
    times = {
        (row.shape, row.case): row.timing.median_us
        for row in result.rows
        if row.kind == "linear" and row.timing is not None
    }
    shapes = [shape for shape, case in times if case == _BASELINE]
    cases = [case for case in dict.fromkeys(case for _, case in times) if case != _BASELINE]
    if not shapes or not cases:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(8.0, 1.6 * len(shapes)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(cases)
    for index, case in enumerate(cases):
        places = [i for i, shape in enumerate(shapes) if (shape, case) in times]
        heights = [times[shapes[i], _BASELINE] / times[shapes[i], case] for i in places]
        left = [i + (index - (len(cases) - 1) / 2) * width for i in places]
        axes.bar(left, heights, width, label=case)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(shapes)), [str(shape) for shape in shapes], rotation=20, fontsize=8)
    axes.set_ylabel(f"times faster than {_BASELINE} (bf16, no low-rank branch)")
    axes.set_title(f"{result.machine.get('gpu', '')}, {result.machine.get('date', '')}")
    axes.legend(fontsize=8, ncols=3)
    figure.savefig(path, dpi=120)
    return True
