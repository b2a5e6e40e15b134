"""Accuracy of the modes of a 4-bit linear, on every block linear of MiniLM-L6 and SmolLM2-135M.

Each linear alone, on inputs of the float model from text that did not calibrate it: relative error
of its output against the float linear in float64 (docs/design/0023-hopper-modes.md). Nothing is
timed. "ratio" is the largest error over that of "exact", the layer's own 4-bit activations.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from halfbyte.bench.mode_accuracy import list_modes, measure_layers, record_inputs, summarize
from halfbyte.bench.sentence_similarity import encode_texts, read_docstrings, split_texts
from halfbyte.bench.text_corpus import encode_topics, split_tokens
from halfbyte.nn.models.minilm import load_minilm
from halfbyte.nn.models.smollm2 import load_smollm2
from timing import make_machine_line

PRESETS = ("nvfp4_plain", "nvfp4_svdquant_r32", "mxfp4_svdquant_r32", "int4_svdquant_r32")
Loaded = tuple[nn.Module, Any, Callable[[], None]]


def load_sentence_encoder() -> Loaded:
    """Return MiniLM-L6, texts that calibrate it, and a run over others."""
    loaded = load_minilm()
    slices = split_texts(read_docstrings())
    calibration = encode_texts(loaded.tokenizer, slices.calibration)
    evaluation = encode_texts(loaded.tokenizer, slices.evaluation[:64])
    return loaded.model, calibration, lambda: [loaded.model(one) for one in evaluation] and None


def load_language_model() -> Loaded:
    """Return SmolLM2, tokens that calibrate it, and a run over others."""
    loaded = load_smollm2()
    tokens = split_tokens(encode_topics(loaded.tokenizer))
    evaluation = tokens.evaluation[:512].unsqueeze(0)
    return (
        loaded.model,
        tokens.calibration.unsqueeze(0),
        lambda: loaded.model.hidden_states(evaluation) is None or None,
    )


MODELS = {"minilm": load_sentence_encoder, "smollm2": load_language_model}


def measure_model(name: str, presets: list[str]) -> list[dict[str, Any]]:
    """Return one row for each preset and mode."""
    model, calibration, run = MODELS[name]()
    inputs = record_inputs(model, run)
    rows = []
    for preset in presets:
        layers = measure_layers(model, preset, calibration, inputs, list_modes(preset))
        for summary in summarize(layers):
            rows.append({"model": name, "preset": preset, "layers": len(layers), **asdict(summary)})
    return rows


def main() -> None:
    """Print the rows as a table, or as one JSON object with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--presets", default=",".join(PRESETS), help="separated by commas")
    arguments = parser.parse_args()
    presets = arguments.presets.split(",")
    rows = [row for name in arguments.models.split(",") for row in measure_model(name, presets)]
    if arguments.json:
        report = {"rows": rows, "machine": make_machine_line(), "torch": torch.__version__}
        print(json.dumps(report, indent=1))
        return
    print(f"{'model':<9}{'preset':<21}{'mode':<7}{'median':>8}{'largest':>9}{'ratio':>8}  where")
    for row in rows:
        print(
            f"{row['model']:<9}{row['preset']:<21}{row['mode']:<7}{row['median']:>8.4f}"
            f"{row['largest']:>9.4f}{row['largest_ratio']:>8.3f}  {row['worst_layer']}"
        )
    print(f"machine: {make_machine_line()}")


if __name__ == "__main__":
    main()
