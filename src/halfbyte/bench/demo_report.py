"""Writes what the demo found: demo.json, demo.png and demo.html, each whole or not at all."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfbyte.bench.demo_chart import draw_chart
from halfbyte.bench.demo_page import make_page
from halfbyte.bench.demo_result import DemoResult, DemoRow
from halfbyte.formats.safetensors_writer import write_bytes_atomically


def make_record(result: DemoResult) -> dict[str, Any]:
    """Return the result as plain JSON data; a figure that is not finite becomes None."""
    slices = {
        name: {"tokens": len(getattr(result.slices, name)), "sha256": digest}
        for name, digest in result.slices.sha256.items()
    }
    record = {
        "rows": [_make_row(result, row) for row in result.rows],
        "model": "SmolLM2-135M-Instruct",
        "is_quick": result.settings.is_quick,
        "protocol": list(result.protocol),
        "notes": list(result.notes),
        "slices": slices,
        "num_weights": result.num_weights,
        "versions": result.versions,
        "machine": result.machine,
        "seconds": round(result.seconds, 2),
        "peak_memory_bytes": result.peak_memory_bytes,
    }
    finite: dict[str, Any] = _replace_non_finite(record)
    return finite


def _make_row(result: DemoResult, row: DemoRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "perplexity": row.accuracy.perplexity,
        "perplexity_ratio": result.perplexity_ratio(row),
        "kl": row.accuracy.kl,
        "top1": row.accuracy.top1,
        "bytes": row.num_bytes,
        "bits_per_weight": result.bits_per_weight(row),
        "quantize_s": round(row.quantize_s, 2),
        "evaluate_s": round(row.evaluate_s, 2),
        "layers": [asdict(layer) for layer in row.layers],
    }


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_report(result: DemoResult, folder: Path) -> list[Path]:
    """Return the paths of the files written into `folder`, which is made where it is missing.

    Everything is rendered before anything is written.
    """
    text = json.dumps(make_record(result), indent=1, allow_nan=False) + "\n"
    files = {
        "demo.json": text.encode(),
        "demo.html": make_page(result).encode(),
        "demo.png": draw_chart(result),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_bytes_atomically(folder / name, content)
    return [folder / name for name in files]
