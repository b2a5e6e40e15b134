"""Files beside the tensors that go along when a checkpoint is converted, and those that do not.

What says how the source's own tensors are quantized does not go along to another family: it would
be read as if it spoke of the new ones. Our own format keeps everything, for the way back.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from halfbyte.checkpoints.deepcompressor import DumpSource
from halfbyte.checkpoints.family import SideContent
from halfbyte.checkpoints.split_files import SPLIT_FILES
from halfbyte.checkpoints.tensor_source import SafetensorsSource, TensorSource
from halfbyte.formats.output_files import encode_json
from halfbyte.formats.side_files import Stamp, find_side_files, read_stamp

CONFIG: Final = "config.json"
QUANTIZATION_KEYS: Final = ("quantization_config", "halfbyte_provenance")  # metadata and config
QUANTIZATION_FILES: Final = (
    "hf_quant_config.json",
    "quantization_config.json",
    "quantize_config.json",
)


@dataclass(frozen=True)
class CarriedFiles:
    """What will lie beside the tensors.

    Attributes:
        made: bytes of files that are written anew.
        copied: names of the source's files that are copied.
        left: names of those that are not.
    """

    made: Mapping[str, bytes]
    copied: tuple[str, ...]
    left: tuple[str, ...]


def choose_files(source: TensorSource, content: SideContent, *, keeps_all: bool) -> CarriedFiles:
    """Return the files that go along to a directory.

    Args:
        source: what is converted.
        content: what the target family makes.
        keeps_all: whether the target keeps how the source was quantized.
    """
    if not source.path.is_dir():
        return CarriedFiles(content.files, (), ())
    taken, left = find_side_files(source.path, list_weight_files(source))
    made = dict(content.files)
    dropped = () if keeps_all else tuple(n for n in QUANTIZATION_FILES if n in taken)
    if CONFIG in taken and CONFIG not in made and not keeps_all:
        cleaned = clean_config(source.configs[CONFIG])
        if cleaned is not None:
            made[CONFIG] = cleaned
    copied = tuple(name for name in taken if name not in made and name not in dropped)
    return CarriedFiles(made, copied, (*left, *dropped))


def clean_config(config: Mapping[str, object]) -> bytes | None:
    """Return a model's configuration without how it was quantized; None where it does not say."""
    kept = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    if kept == config:
        return None
    return encode_json(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def list_weight_files(source: TensorSource) -> tuple[str, ...]:
    """Return the names of the files in a directory that hold its tensors."""
    if isinstance(source, SafetensorsSource):
        return tuple(source.checkpoint.shards)
    return source.file_names if isinstance(source, DumpSource) else SPLIT_FILES


def read_stamps(source: TensorSource, copied: tuple[str, ...]) -> dict[Path, Stamp]:
    """Return the stamps of all files that are read: those with tensors, and `copied` ones."""
    path = source.path
    if not path.is_dir():
        return {path: read_stamp(path)}
    names = (*list_weight_files(source), *copied)
    return {path / name: read_stamp(path / name) for name in names}
