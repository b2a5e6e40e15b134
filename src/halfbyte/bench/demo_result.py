"""The records of the demo: what was run, and each row of its table."""

from dataclasses import dataclass

from halfbyte.bench.language_model_accuracy import LanguageModelAccuracy
from halfbyte.bench.text_corpus import CALIBRATION_TOKENS, EVALUATION_TOKENS, TokenSlices
from halfbyte.nn.report import LinearReport

AS_SHIPPED = "as_shipped"
# Row names are preset names.
PRESETS = ("int4_plain", "int4_svdquant_r32", "nvfp4_plain", "nvfp4_svdquant_r32")


@dataclass(frozen=True)
class DemoSettings:
    """How much of the demo to run.

    Attributes:
        num_layers: decoder layers kept, None for all.
        num_calibration: tokens that calibrate.
        num_evaluation: tokens that are predicted.
    """

    num_layers: int | None = None
    num_calibration: int = CALIBRATION_TOKENS
    num_evaluation: int = EVALUATION_TOKENS

    @property
    def is_quick(self) -> bool:
        """Whether the figures are not the protocol's."""
        return self != DemoSettings()


QUICK_SETTINGS = DemoSettings(num_layers=1, num_calibration=64, num_evaluation=192)


@dataclass(frozen=True)
class DemoRow:
    """One line of the demo's table.

    Attributes:
        name: "as_shipped" or the preset's name.
        accuracy: perplexity, KL and top-1 agreement against the model as shipped.
        num_bytes: bytes of all block linears with scales and low-rank parts.
        quantize_s: seconds of quantization with calibration; 0 as shipped.
        evaluate_s: seconds of the evaluation.
        layers: one entry a linear; empty as shipped.
    """

    name: str
    accuracy: LanguageModelAccuracy
    num_bytes: int
    quantize_s: float
    evaluate_s: float
    layers: tuple[LinearReport, ...]


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo shows or writes.

    Attributes:
        settings: how much was run.
        rows: as shipped first.
        slices: the token slices, for sizes and hashes.
        protocol: the protocol in plain lines.
        notes: what the table's columns count.
        num_weights: weights of all block linears.
        versions, machine: what it ran on.
        seconds: wall time in all.
        peak_memory_bytes: largest resident size of the process.
    """

    settings: DemoSettings
    rows: tuple[DemoRow, ...]
    slices: TokenSlices
    protocol: tuple[str, ...]
    notes: tuple[str, ...]
    num_weights: int
    versions: dict[str, str]
    machine: dict[str, str | int]
    seconds: float
    peak_memory_bytes: int

    def bits_per_weight(self, row: DemoRow) -> float:
        """Return stored bits for each weight of the block linears in `row`."""
        return row.num_bytes * 8 / self.num_weights

    def perplexity_ratio(self, row: DemoRow) -> float:
        """Return the row's perplexity over that of the model as shipped."""
        return row.accuracy.perplexity / self.rows[0].accuracy.perplexity
