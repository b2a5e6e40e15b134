"""Whether what stands at a target is the finished output of the very conversion that is asked for.

A run leaves in its report what decides its output (families, headers, sizes and times of the files
that were read, adapters, this version) and the checksum of every unit of tensors. All of it must
hold of the files as they are now; where something is missing, other, or there too, the answer is
no, and nothing is taken for finished that only looks like it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.checkpoints.conversion_plan import ConversionPlan
from halfbyte.errors import CheckpointError
from halfbyte.formats.output_files import encode_index
from halfbyte.formats.side_files import MAX_SIDE_BYTES, read_side_file
from halfbyte.formats.unfinished_output import has_checksums
from halfbyte.version import __version__

REPORT_KIND = "halfbyte convert"
_MAX_REPORT_BYTES = 2**30


def make_mark(fingerprint: str, checksums: Mapping[str, int]) -> dict[str, Any]:
    """Return what a report keeps to know its output again.

    Args:
        fingerprint: of the run, by `ConversionPlan.make_fingerprint`.
        checksums: CRC-32 of the output tensors of every unit, by its name.
    """
    return {"halfbyte": __version__, "fingerprint": fingerprint, "checksums": dict(checksums)}


def is_finished(
    places: tuple[Path, Path, Path],
    plan: ConversionPlan,
    fingerprint: str,
    tensors: Mapping[str, Sequence[str]],
) -> bool:
    """Return whether a target is what this conversion would write there.

    Args:
        places: source, target, report.
        plan: of the conversion.
        fingerprint: of the conversion.
        tensors: names of the output tensors of every unit.
    """
    source, target, report = places
    if not os.path.lexists(target) or target.is_dir() != plan.is_directory:
        return False
    checksums = _read_checksums(report, fingerprint)
    if checksums is None:
        return False
    try:
        if plan.is_directory and not _has_other_files(source, target, plan):
            return False
    except (OSError, CheckpointError):
        return False
    return has_checksums(target, plan.files, checksums, tensors)


def list_made_files(plan: ConversionPlan) -> dict[str, bytes]:
    """Return the bytes of the files beside the tensors that a conversion makes, by name."""
    files = dict(plan.side_files)
    if plan.index_name is not None:
        files[plan.index_name] = encode_index(plan.files)
    return files


def _read_checksums(report: Path, fingerprint: str) -> Mapping[str, int] | None:
    """Return the checksums that a report keeps; None where it is of another run, or of none."""
    try:
        if report.stat().st_size > _MAX_REPORT_BYTES:
            return None
        found = json.loads(report.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("report") != REPORT_KIND:
        return None
    mark = found.get("finished")
    checksums = mark.get("checksums") if isinstance(mark, dict) else None
    if not isinstance(checksums, dict) or mark != make_mark(fingerprint, checksums):
        return None
    return checksums


def _has_other_files(source: Path, target: Path, plan: ConversionPlan) -> bool:
    """Return whether a directory has exactly the files of the plan, those beside tensors as is."""
    wanted = list_made_files(plan)
    wanted |= {name: read_side_file(source, name) for name in plan.copied_files}
    if set(os.listdir(target)) != {*wanted, *(file.name for file in plan.files)}:
        return False
    return all(
        (target / name).stat().st_size <= MAX_SIDE_BYTES + len(data)
        and read_side_file(target, name) == data
        for name, data in wanted.items()
    )
