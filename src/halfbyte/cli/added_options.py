"""Options that are added around a verb, which then asks for what they say."""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

Chosen = TypeVar("Chosen")


class AddedOptions(Generic[Chosen]):
    """A group of options of several verbs, or one too many for a verb's own parameters.

    Attributes:
        chosen: what they say while a verb runs.
    """

    def __init__(
        self, options: Mapping[str, Any], read: Callable[..., Chosen], default: Chosen
    ) -> None:
        """Add `options` (name -> annotation, None by default), turned into a value by `read`."""
        self._options = dict(options)
        self._read = read
        self.chosen: ContextVar[Chosen] = ContextVar("+".join(options), default=default)

    def put_on(self, verb: Callable[..., None]) -> Callable[..., None]:
        """Return `verb` with the options."""

        @functools.wraps(verb)
        def extended(**given: Any) -> None:
            token = self.chosen.set(self._read(*(given.pop(name) for name in self._options)))
            try:
                verb(**given)
            finally:
                self.chosen.reset(token)

        signature = inspect.signature(verb)
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in self._options.items()
        ]
        parameters = [*signature.parameters.values(), *added]
        # What typer reads a verb's options from; functions have no such attribute for mypy.
        extended.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        extended.__annotations__ = {**verb.__annotations__, **self._options}
        return extended
