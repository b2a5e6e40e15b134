"""Accuracy of MiniLM-L6 in 4 bits: cosine and Spearman to float32, on Python's docstrings.

All 36 block linears get 4-bit weights and activations. 128 docstrings calibrate, 256 others judge
(docs/design/0010-accuracy-protocol.md). Seconds are wall time of one quantization each.
"""

import argparse
import json
import time
from dataclasses import asdict
from typing import Any

import torch

from halfbyte.bench.demo import (
    count_linear_bytes,
    list_block_linears,
    quantize_with_preset,
    restore_linears,
)
from halfbyte.bench.demo_result import PRESETS
from halfbyte.bench.sentence_similarity import (
    compare_embeddings,
    embed_texts,
    encode_texts,
    read_docstrings,
    split_texts,
)
from halfbyte.nn.models.minilm import load_minilm
from timing import make_machine_line


def measure_presets() -> list[dict[str, Any]]:
    """Return one row a preset: name, cosine, spearman, bytes of the linears, seconds."""
    loaded = load_minilm()
    slices = split_texts(read_docstrings())
    calibration = encode_texts(loaded.tokenizer, slices.calibration)
    evaluation = encode_texts(loaded.tokenizer, slices.evaluation)
    reference = embed_texts(loaded.model, evaluation)
    linears = list_block_linears(loaded.model)
    rows = []
    for preset in PRESETS:
        started = time.perf_counter()
        quantize_with_preset(loaded.model, preset, calibration)
        seconds = time.perf_counter() - started
        similarity = compare_embeddings(reference, embed_texts(loaded.model, evaluation))
        num_bytes = count_linear_bytes(loaded.model, list(linears))
        restore_linears(loaded.model, linears)
        row = {"name": preset, **asdict(similarity), "bytes": num_bytes, "quantize_s": seconds}
        rows.append(row)
    return rows


def main() -> None:
    """Print the rows as a table, or as one JSON object with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows = measure_presets()
    if arguments.json:
        report = {"rows": rows, "machine": make_machine_line(), "torch": torch.__version__}
        print(json.dumps(report, indent=1))
        return
    print(f"{'row':<20}{'cosine':>9}{'spearman':>10}{'bytes':>12}{'quantize, s':>13}")
    for row in rows:
        print(
            f"{row['name']:<20}{row['cosine']:>9.4f}{row['spearman']:>10.4f}"
            f"{row['bytes']:>12,}{row['quantize_s']:>13.1f}"
        )
    print(f"machine: {make_machine_line()}")


if __name__ == "__main__":
    main()
