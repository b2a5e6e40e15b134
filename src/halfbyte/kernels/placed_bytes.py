"""How much memory the placed tensors of a linear take, and how much of it is the record's own."""

from dataclasses import fields
from typing import Any

import torch


def count_bytes(record: Any) -> int:
    """Return the bytes of all tensors among the fields of a dataclass."""
    return sum(part.numel() * part.element_size() for part in _list_tensors(record))


def count_shared_bytes(placed: Any, *records: Any) -> int:
    """Return the bytes of placed tensors that start where a tensor of `records` does."""
    of_records = {part.data_ptr() for record in records for part in _list_tensors(record)}
    return sum(
        part.numel() * part.element_size()
        for part in _list_tensors(placed)
        if part.data_ptr() in of_records
    )


def _list_tensors(record: Any) -> list[torch.Tensor]:
    parts = (getattr(record, field.name) for field in fields(record))
    return [part for part in parts if isinstance(part, torch.Tensor)]
