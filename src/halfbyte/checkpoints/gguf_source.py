"""The tensors of a GGUF file as a `TensorSource`."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch

from halfbyte.checkpoints.file_range import read_range
from halfbyte.errors import CheckpointError
from halfbyte.formats.gguf_header import (
    KEY_VALUES_KEY,
    MAX_GGUF_HEADER_BYTES,
    TYPES_KEY,
    GgufHeader,
    encode_key_values,
    parse_gguf_header,
)
from halfbyte.formats.safetensors_header import TensorEntry, TensorSpec, quoted
from halfbyte.formats.safetensors_reader import CHUNK_BYTES, open_regular_file

FIRST_BYTES: Final = 2**20  # of the header; read again in whole where it is longer


class GgufSource:
    """A GGUF file; a context manager. Tensors of blocks are uint8 [..., bytes of a row].

    Attributes:
        path: as given.
        metadata: strings and numbers of the header as text; under TYPES_KEY the tensors' types in
            file order; under KEY_VALUES_KEY all key-values as they stand.
        configs: always empty.
        specs: the tensors by name.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`; CheckpointError for anything but a whole GGUF file of a known version."""
        self.path = path
        self.configs: Mapping[str, Any] = {}
        self._fd = open_regular_file(path)
        try:
            header = self._read_header()
        except OSError as error:
            self.close()
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        except BaseException:
            self.close()
            raise
        self._entries: Mapping[str, TensorEntry] = header.tensors
        self.specs: Mapping[str, TensorSpec] = dict(sorted(header.tensors.items()))
        shown = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in header.scalars.items()
        }
        self.metadata: Mapping[str, str] = {
            **{key: text for key, text in shown.items() if text.isprintable()},
            TYPES_KEY: json.dumps(list(header.types.items())),
            KEY_VALUES_KEY: encode_key_values(header.key_values),
        }

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor called `name`, in its own memory."""
        entry = self._get(name)
        dtype = entry.dtype.torch_dtype
        assert dtype is not None  # GGUF has only such numbers
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        data = read_range(self.path, self._fd, entry.start, entry.num_bytes)
        return torch.from_numpy(data).view(dtype).reshape(entry.shape)

    def iter_bytes(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the bytes of tensor `name` in order, [n] uint8 each."""
        entry = self._get(name)
        for start in range(entry.start, entry.stop, CHUNK_BYTES):
            size = min(CHUNK_BYTES, entry.stop - start)
            yield torch.from_numpy(read_range(self.path, self._fd, start, size))

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _get(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: has no tensor {quoted(name)}")
        return self._entries[name]

    def _read_header(self) -> GgufHeader:
        file_bytes = os.fstat(self._fd).st_size
        size = min(file_bytes, FIRST_BYTES)
        while True:
            head = read_range(self.path, self._fd, 0, size).tobytes()
            longest = min(file_bytes, MAX_GGUF_HEADER_BYTES)
            try:
                return parse_gguf_header(self.path, head, file_bytes)
            except CheckpointError:
                if size == longest:
                    raise
            size = min(16 * size, longest)
