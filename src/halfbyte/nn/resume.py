"""Finished blocks on disk, so that a killed quantization goes on where it stopped.

The directory holds `run.json`, what the run is made from, and one halfbyte file for each finished
block with its reports in the metadata. Every file appears whole, by rename.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte.errors import CheckpointError
from halfbyte.formats.halfbyte_file import read_halfbyte_file, write_halfbyte_file
from halfbyte.formats.packing import view_as_bytes
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_writer import write_bytes_atomically
from halfbyte.nn.block_walk import Call
from halfbyte.nn.report import LinearReport
from halfbyte.svdquant.linear_rules import LinearRules
from halfbyte.svdquant.presets import SVDQuantPreset
from halfbyte.version import __version__

_RUN_FILE = "run.json"
_REPORTS_KEY = "reports"


class ResumeState:
    """The state directory of one run."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, which exists and belongs to this run."""
        self._folder = folder

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        model: nn.Module,
        preset: SVDQuantPreset,
        rules: LinearRules,
        calls: Sequence[Call] | None,
    ) -> "ResumeState":
        """Return the state in `folder`, made where absent.

        Args:
            folder: of this run alone.
            model: not yet quantized; all its parameters and buffers identify the run, for all of
                them shape the inputs of its linears.
            preset, rules: of the run.
            calls: the calibration, or None.

        Raises:
            CheckpointError: the directory holds another run or cannot be used, or the calibration
                holds something that no hash can tell from something else.
        """
        path = Path(folder)
        wanted = {
            "halfbyte": __version__,
            "torch": torch.__version__,
            "preset": asdict(preset),
            "rules": asdict(rules),
            "weights_sha256": _hash_model(model),
            "calibration_sha256": _hash_calls(calls),
        }
        wanted = json.loads(json.dumps(wanted))
        try:
            path.mkdir(parents=True, exist_ok=True)
            found = path / _RUN_FILE
            if found.exists():
                _check_same_run(found, wanted)
            elif any(path.iterdir()):
                raise CheckpointError(
                    f"{path}: not empty and without {_RUN_FILE}; give a directory of its own"
                )
            else:
                write_bytes_atomically(found, json.dumps(wanted, indent=1).encode())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be used as state_dir: {error}") from error
        return cls(path)

    def read_block(
        self, index: int, names: Sequence[str]
    ) -> tuple[dict[str, QuantizedLinear], list[LinearReport]] | None:
        """Return the records and reports of a finished block, or None.

        Raises CheckpointError for a file that is corrupt or not of the linears called `names`.
        """
        path = self._path(index)
        if not path.exists():
            return None
        contents = read_halfbyte_file(path)
        try:
            entries = json.loads(contents.metadata[_REPORTS_KEY])
            reports = [LinearReport(**{**e, "group": tuple(e["group"])}) for e in entries]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: its reports are damaged ({error!r}); remove the file"
            ) from error
        found = sorted(report.name for report in reports)
        if not sorted(contents.linears) == found == sorted(names):
            raise CheckpointError(
                f"{path}: holds {sorted(contents.linears)}, wanted {sorted(names)}; remove the file"
            )
        return contents.linears, reports

    def write_block(
        self, index: int, records: Mapping[str, QuantizedLinear], reports: Sequence[LinearReport]
    ) -> None:
        """Keep a finished block."""
        text = json.dumps([asdict(report) for report in reports])
        write_halfbyte_file(self._path(index), records, metadata={_REPORTS_KEY: text})

    def _path(self, index: int) -> Path:
        return self._folder / f"block-{index:05d}.safetensors"


def _check_same_run(path: Path, wanted: dict[str, Any]) -> None:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}); remove the directory") from error
    seen = found if isinstance(found, dict) else {}
    differing = [key for key in wanted if seen.get(key) != wanted[key]]
    if differing:
        raise CheckpointError(
            f"{path}: belongs to a run with other {', '.join(differing)}; "
            "remove the directory or give another state_dir"
        )


def _hash_model(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name!r}:".encode())
        _hash_tensor(digest, tensor)
    return digest.hexdigest()


def _hash_calls(calls: Sequence[Call] | None) -> str:
    digest = hashlib.sha256()
    _hash_value(digest, None if calls is None else [(call.args, call.kwargs) for call in calls])
    return digest.hexdigest()


def _hash_value(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        _hash_tensor(digest, value)
    elif isinstance(value, Mapping):
        _hash_value(digest, [[str(key), item] for key, item in value.items()])
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _hash_value(digest, item)
    elif value is None or isinstance(value, bool | int | float | str):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    else:
        raise CheckpointError(
            f"calibration holds {type(value).__name__}; with state_dir, wanted tensors, numbers, "
            "text and lists, tuples or mappings of them"
        )


def _hash_tensor(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(view_as_bytes(tensor.detach().cpu()).numpy())
