"""Numbered things of one program: constants, handler names, attributes, operands."""

from halfbyte.ptx.instruction_form import WIDTHS

WORDS = {"b8": 1, "b16": 1, "b32": 1, "b64": 2, "b128": 4}


class ConstantPool:
    """The constants of a program, each stored once per width."""

    def __init__(self) -> None:
        """Start empty."""
        self._positions: dict[tuple[int, int], int] = {}

    def find_operand(self, value: int, width: str) -> int:
        """Return the operand that reads `value` (taken modulo its width): `~index`."""
        bits = WIDTHS[width]
        key = (value & ((1 << bits) - 1), WORDS[width])
        position = self._positions.setdefault(key, len(self._positions))
        return ~position

    def list_records(self) -> list[tuple[int, int, int]]:
        """Return (low 64 bits, high 64 bits, words) of every constant in order."""
        mask = (1 << 64) - 1
        return [(value & mask, value >> 64, words) for value, words in self._positions]


class NamePool:
    """Handler names in order of first use."""

    def __init__(self) -> None:
        """Start empty."""
        self._positions: dict[str, int] = {}

    def find(self, name: str) -> int:
        """Return the number of `name`."""
        return self._positions.setdefault(name, len(self._positions))

    def list_names(self) -> tuple[str, ...]:
        """Return the names in order of their numbers."""
        return tuple(self._positions)


class ArrayPool:
    """Short integer lists in one array; equal lists share their place."""

    def __init__(self) -> None:
        """Start empty."""
        self.values: list[int] = []
        self._positions: dict[tuple[int, ...], int] = {}

    def add(self, items: tuple[int, ...]) -> int:
        """Return where `items` start in `values`."""
        if not items:
            return 0
        position = self._positions.get(items)
        if position is None:
            position = self._positions[items] = len(self.values)
            self.values.extend(items)
        return position
