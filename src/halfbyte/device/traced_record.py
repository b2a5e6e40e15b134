"""A record that never changes, for use inside dynamic loops and branches.

CuTe DSL takes an object whose method is called in a dynamic `if` or loop to be changed there, and
carries it through as run-time values. A record of pointers, layouts and constants does not change:
it has no values to carry.
"""

from collections.abc import Sequence
from typing import Any, Self


class TracedRecord:
    """Base of records whose fields are set once; regions use them as they are."""

    def __extract_mlir_values__(self) -> list[Any]:
        """Return no values: nothing changes."""
        return []

    def __new_from_mlir_values__(self, values: Sequence[Any]) -> Self:
        """Return the record itself."""
        assert not values
        return self
