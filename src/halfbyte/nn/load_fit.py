"""Whether what a file holds fits the place that it goes to, by shapes, formats and dtypes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from halfbyte.checkpoints.fusion import fuse_linears, take_linear_rows
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import quoted
from halfbyte.nn.w4a4_linear import W4A4Linear
from halfbyte.ops.linear_parts import make_spec

_FLOATS = (*FLOAT_DTYPES, torch.float64)


@dataclass(frozen=True)
class Piece:
    """Rows of a layer or tensor of the file.

    Attributes:
        name: in the file.
        rows: first and one past the last; None for all.
    """

    name: str
    rows: tuple[int, int] | None = None


Pieces = tuple[Piece, ...]


def join_pieces(
    place: str, pieces: Pieces, read: Callable[[str], QuantizedLinear]
) -> QuantizedLinear:
    """Return the linear that the pieces make; CheckpointError where they cannot be fused."""
    parts = []
    for piece in pieces:
        linear = read(piece.name)
        parts.append(linear if piece.rows is None else take_linear_rows(linear, *piece.rows))
    try:
        return fuse_linears(parts)
    except FormatError as error:
        names = ", ".join(quoted(piece.name) for piece in pieces)
        raise CheckpointError(f"{place} of {names}: {error}") from error


def check_linear(
    source: TensorSource,
    pieces: Pieces,
    records: Mapping[str, QuantizedLinear],
    target: tuple[str, nn.Module],
) -> None:
    """Check that the pieces make the linear of `target`, a name and module of the model.

    Raises:
        CheckpointError: no linear, one with a hook, other sizes, another format, a missing bias.
    """
    place, module = target
    where = f"{source.path}: {' + '.join(quoted(piece.name) for piece in pieces)}"
    if not isinstance(module, nn.Linear | W4A4Linear):
        raise CheckpointError(
            f"{where} is 4-bit in the file, {quoted(place)} of the model is a "
            f"{type(module).__name__}, wanted torch.nn.Linear"
        )
    if hasattr(module, "_hf_hook"):
        raise CheckpointError(
            f"{where}: {quoted(place)} of the model has a hook of accelerate, which a replaced "
            "linear would lose; load first, then call accelerate.dispatch_model"
        )
    _check_rows(where, pieces, records, place)
    record = join_pieces(f"{source.path}: {quoted(place)}", pieces, records.__getitem__)
    sizes = (record.in_features, record.out_features)
    wanted = (module.in_features, module.out_features)
    if sizes != wanted:
        raise CheckpointError(
            f"{where} is {sizes[0]} -> {sizes[1]} in the file, {quoted(place)} is "
            f"{wanted[0]} -> {wanted[1]} in the model; build it from the file's configuration"
        )
    if isinstance(module, W4A4Linear):
        spec = make_spec(record)
        if spec != module.spec:
            raise CheckpointError(
                f"{where} is {spec.encode()} in the file, {quoted(place)} is already "
                f"{module.spec.encode()} in the model; load into a model built from config"
            )
    elif module.bias is not None:
        bare = [piece.name for piece in pieces if records[piece.name].bias is None]
        if bare:
            raise CheckpointError(
                f"{where}: {quoted(place)} of the model has a bias, the file has none in "
                f"{', '.join(map(quoted, bare))}"
            )


def _check_rows(
    where: str, pieces: Pieces, records: Mapping[str, QuantizedLinear], place: str
) -> None:
    """Check that a layer that is split has rows for the piece."""
    for piece in pieces:
        have = records[piece.name].out_features
        if piece.rows is not None and piece.rows[1] > have:
            raise CheckpointError(
                f"{where} has {have} rows in the file, {quoted(place)} of the model would be its "
                f"rows {piece.rows[0]} to {piece.rows[1]}"
            )


def check_tensor(source: TensorSource, pieces: Pieces, place: str, wanted: torch.Tensor) -> None:
    """Check that the pieces make the tensor `wanted`; CheckpointError for its shape or dtype."""
    where = f"{source.path}: tensor {' + '.join(quoted(piece.name) for piece in pieces)}"
    specs = [source.specs[piece.name] for piece in pieces]
    shapes = []
    for piece, spec in zip(pieces, specs, strict=True):
        shape = tuple(spec.shape)
        if piece.rows is not None and shape:
            shape = (max(0, min(piece.rows[1], shape[0]) - piece.rows[0]), *shape[1:])
        shapes.append(shape)
    joined = shapes[0]
    if len(shapes) > 1 and all(shapes) and len({shape[1:] for shape in shapes}) == 1:
        joined = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    if joined != tuple(wanted.shape):
        raise CheckpointError(
            f"{where} is {' + '.join(str(list(spec.shape)) for spec in specs)} in the file, "
            f"{quoted(place)} is {list(wanted.shape)} in the model"
        )
    for spec in specs:
        dtype = spec.dtype.torch_dtype
        if dtype != wanted.dtype and not (dtype in _FLOATS and wanted.dtype in _FLOATS):
            raise CheckpointError(
                f"{where} is {spec.dtype.name} in the file, {quoted(place)} is {wanted.dtype} in "
                "the model; one cannot be converted to the other without knowing more"
            )
