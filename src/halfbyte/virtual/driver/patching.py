"""Replacements of attributes, mapping items and environment variables, undone in reverse order."""

import os
from collections.abc import Callable, MutableMapping
from typing import Any

_ABSENT = object()


class Patches:
    """What was replaced, so that `undo` can put the originals back."""

    def __init__(self) -> None:
        """Start with nothing replaced."""
        self._originals: list[tuple[Any, Any, Any, bool]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set the attribute `name` of a module, class or object."""
        # The class's own dictionary keeps descriptors (static methods, properties) as they are.
        original = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else _ABSENT
        self._originals.append((owner, name, original, False))
        setattr(owner, name, value)

    def set_item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set one item of a mapping."""
        self._originals.append((mapping, key, mapping.get(key, _ABSENT), True))
        mapping[key] = value

    def set_environment(self, name: str, value: str) -> None:
        """Set an environment variable of this process."""
        self.set_item(os.environ, name, value)

    def set_present(self, owner: Any, table: MutableMapping[str, Any]) -> None:
        """Set the attributes of `table` that `owner` has; others are not there to replace."""
        for name, value in table.items():
            if hasattr(owner, name):
                self.set(owner, name, value)

    def call_on_undo(self, action: Callable[[], None]) -> None:
        """Call `action` in its turn when everything is put back."""
        self._originals.append((action, None, _ABSENT, False))

    def undo(self) -> None:
        """Put every original back, the last replacement first."""
        while self._originals:
            owner, name, original, is_item = self._originals.pop()
            if name is None:
                owner()
            elif is_item and original is _ABSENT:
                owner.pop(name, None)
            elif is_item:
                owner[name] = original
            elif original is _ABSENT:
                if name in vars(owner):
                    delattr(owner, name)
            else:
                setattr(owner, name, original)
