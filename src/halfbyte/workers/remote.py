"""What runs in a worker process: one unit, after the worker has shown that it may.

Arguments and results are plain Python values and NumPy arrays; the job and the unit travel pickled
inside `bytes`, so that a worker with other code answers with what it is instead of failing to read
them.
"""

import os
import pickle
import socket
import zlib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from halfbyte.errors import CheckpointError, FormatError, WorkerError
from halfbyte.formats.packing import view_as_bytes
from halfbyte.workers.identity import Identity
from halfbyte.workers.job import Job, OpenJob, UnitResult

REFUSED: Final = "refused"
_open_jobs: dict[bytes, OpenJob] = {}  # the one job at hand, kept open from unit to unit


def work_off_remotely(
    identity: dict[str, str], threads: int, job: bytes, unit: bytes
) -> dict[str, Any]:
    """Return a unit's result, or why this process is not fit for it.

    Args:
        identity: the fields of the coordinator's `Identity`.
        threads: torch threads to work with.
        job, unit: pickled `Job` and `WorkUnit`.

    Returns:
        {"refused": text} or {"where", "source_checksum", "layers", "tensors"}, the tensors as
        (bytes, dtype name, shape) by name.

    Raises:
        WorkerError: the input cannot be read here.
        HalfbyteError: the unit cannot be worked off anywhere.
    """
    where = name_process()
    torch.set_num_threads(threads)
    difference = describe_difference(identity, asdict(Identity.read(threads)))
    if difference:
        return {REFUSED: f"{where} has {difference}"}
    try:
        opened = _open_job(job)
        wanted = pickle.loads(unit)
        checksum = measure_chunks(opened.iter_source_bytes(wanted))
    except (CheckpointError, OSError) as error:
        raise WorkerError(
            f"{where} cannot read the input: {error}; every worker must be able to read it under "
            "the same path"
        ) from error
    try:
        result = opened.work_off(wanted)
    except FormatError as error:
        raise CheckpointError(str(error)) from error
    return {
        "where": where,
        "source_checksum": checksum,
        "layers": result.layers,
        "tensors": {name: _pack(tensor) for name, tensor in result.tensors.items()},
    }


def unpack_result(answer: dict[str, Any]) -> UnitResult:
    """Return the result inside an answer that is no refusal."""
    tensors = {
        name: torch.from_numpy(np.array(data)).view(getattr(torch, dtype)).reshape(shape)
        for name, (data, dtype, shape) in answer["tensors"].items()
    }
    return UnitResult(tensors, answer["layers"])


def describe_difference(wanted: dict[str, str], found: dict[str, str]) -> str:
    """Return the facts in which a process differs, in words; empty where it does not."""
    return ", ".join(
        f"{name} {found.get(name, '')!r} (wanted {wanted.get(name, '')!r})"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    )


def measure_chunks(chunks: Iterable[torch.Tensor]) -> int:
    """Return the CRC-32 of [n] uint8 chunks one after another."""
    checksum = 0
    for chunk in chunks:
        checksum = zlib.crc32(chunk.numpy().data, checksum)
    return checksum


def name_process() -> str:
    """Return what an error calls this process."""
    return f"worker {os.getpid()} on {socket.gethostname()}"


def _open_job(payload: bytes) -> OpenJob:
    if payload not in _open_jobs:
        _open_jobs.clear()
        job: Job = pickle.loads(payload)
        _open_jobs[payload] = job.open()
    return _open_jobs[payload]


def _pack(tensor: torch.Tensor) -> tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return view_as_bytes(tensor.detach()).numpy(), dtype, tuple(tensor.shape)
