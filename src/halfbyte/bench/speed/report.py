"""A speed run as files: CSV and JSON for programs, Markdown and (with matplotlib) a plot."""

import csv
import importlib.util
import io
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfbyte.bench.speed.result import LaunchRow, SpeedResult, SpeedRow, flatten_row
from halfbyte.errors import UsageError

_BASELINES = {"linear": "cublas", "quantize": "copy", "copy": "copy", "launch": "cublas"}


def make_json(result: SpeedResult) -> dict[str, Any]:
    """Return the run as plain values."""
    return {
        "machine": result.machine,
        "rates": asdict(result.rates) if result.rates else None,
        "seconds": round(result.seconds, 1),
        "rows": [flatten_row(row, result.rates) for row in result.rows],
        "launches": [
            {
                "case": one.case,
                **asdict(one.shape),
                "median_us": one.median_us,
                "p90_us": one.p90_us,
            }
            for one in result.launches
        ],
    }


def make_csv(result: SpeedResult) -> str:
    """Return the rows as CSV, under comment lines that say what they were measured on."""
    text = io.StringIO()
    for name, value in result.machine.items():
        text.write(f"# {name}: {value}\n")
    rows = [flatten_row(row, result.rates) for row in result.rows]
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def make_markdown(result: SpeedResult) -> str:
    """Return the run as a page: the machine, one table for each kind, the kernels of each case."""
    lines = ["# Speed", "", "Made by `halfbyte bench`; docs/benchmarks.md says what is what.", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in result.machine.items()]
    if result.rates is not None:
        rates = result.rates
        lines.append(
            f"| sustained | {rates.bf16_tflops:.0f} TFLOPS bf16, {rates.fp8_tflops:.0f} TFLOPS "
            f"fp8 (8192^3), copy {rates.copy_bytes_per_s / 1e12:.2f} TB/s |"
        )
    lines.append(f"| run | {result.seconds:.0f} s |")
    for kind in dict.fromkeys(row.kind for row in result.rows):
        lines += ["", f"## {kind}", "", *_make_table(result, kind)]
    if result.launches:
        lines += ["", "## launch", "", *_make_launch_table(result.launches)]
    lines += ["", "## Kernels of one call", "", *_list_kernels(result.rows)]
    return "\n".join(lines) + "\n"


def _make_table(result: SpeedResult, kind: str) -> Iterable[str]:
    baseline = _BASELINES[kind]
    yield (
        f"| MxKxNxR | case | us | p10-p90 | x {baseline} | TFLOPS | of rate | GB/s | MHz | W | C | "
        "held by | error |"
    )
    yield "|---" * 13 + "|"
    rows = [row for row in result.rows if row.kind == kind]
    times = {(row.shape, row.case): row.timing.median_us for row in rows if row.timing}
    for row in rows:
        flat = {name: _show(value) for name, value in flatten_row(row, result.rates).items()}
        if row.timing is None:
            yield f"| {row.shape} | {row.case} | {row.status} | {row.message} |" + " |" * 9
            continue
        compared = times.get((row.shape, baseline))
        ratio = f"{compared / row.timing.median_us:.2f}" if compared else ""
        rate = f"{flat['share_of_rate']} {flat['rate']}".strip()
        error = "" if row.error is None else f"{row.error:.1e}"
        yield (
            f"| {row.shape} | {row.case} | {row.timing.median_us:.2f} | {flat['p10_us']}-"
            f"{flat['p90_us']} | {ratio} | {flat['tflops']} | {rate} | {flat['gb_per_s']} | "
            f"{flat['clock_mhz']} | {flat['power_w']} | {flat['temperature_c']} | "
            f"{flat['reasons']} | {error} |"
        )


def _show(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _make_launch_table(launches: Iterable[LaunchRow]) -> Iterable[str]:
    yield "Host time of one prepared launch, no graph."
    yield ""
    yield "| MxKxNxR | case | us | p90 |"
    yield "|---|---|---|---|"
    for row in launches:
        yield f"| {row.shape} | {row.case} | {row.median_us:.2f} | {row.p90_us:.2f} |"


def _list_kernels(rows: Iterable[SpeedRow]) -> Iterable[str]:
    """Yield each case's kernels once for all shapes that have the same."""
    shapes: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        if row.operations:
            shapes.setdefault((row.case, row.operations), []).append(str(row.shape))
    for (case, operations), found in shapes.items():
        yield f"- {case} ({', '.join(dict.fromkeys(found))}):"
        for operation in operations:
            yield f"  - `{operation}`"


def write_report(result: SpeedResult, folder: Path) -> list[Path]:
    """Write speed.csv, speed.json, speed.md and, with matplotlib, speed.png; return their paths.

    Raises:
        UsageError: the folder cannot be written.
    """
    paths = write_tables(result, folder)
    if importlib.util.find_spec("matplotlib") is not None:
        from halfbyte.bench.speed.plot import write_plot

        if write_plot(result, folder / "speed.png"):
            paths.append(folder / "speed.png")
    return paths


def write_tables(result: SpeedResult, folder: Path) -> list[Path]:
    """Write speed.csv, speed.json and speed.md; return their paths.

    Raises:
        UsageError: the folder cannot be written.
    """
    texts = {
        "speed.csv": make_csv(result),
        "speed.json": json.dumps(make_json(result), indent=1) + "\n",
        "speed.md": make_markdown(result),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the report cannot be written to {folder}: {error}") from None
    return [folder / name for name in texts]
