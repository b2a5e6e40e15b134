"""The instruction forms known, one module per family, keyed by full dotted name.

`INSTRUCTION_FORMS` is made on first use from the modules of this folder: their `FORMS` tuples, and
a `resolve` function where a family has more spellings than a list can hold (cache operators, memory
order, scope). Iteration gives the listed forms alone; a look-up knows both.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping

from halfbyte.ptx.instruction_form import InstructionForm, index_forms

__all__ = ["INSTRUCTION_FORMS", "InstructionForms"]

Resolver = Callable[[str], InstructionForm | None]


class InstructionForms(Mapping[str, InstructionForm]):
    """The forms by full name: listed ones, and those a family's grammar resolves."""

    def __init__(
        self, listed: dict[str, InstructionForm], resolvers: dict[str, tuple[Resolver, ...]]
    ) -> None:
        """Make the table; `resolvers` are keyed by the first word of the opcodes they know."""
        self._listed = listed
        self._resolvers = resolvers
        self._resolved: dict[str, InstructionForm] = dict(listed)

    def __getitem__(self, name: str) -> InstructionForm:
        """Return the form; raise KeyError when neither list nor grammar knows the name."""
        form = self._resolved.get(name)
        if form is not None:
            return form
        for resolve in self._resolvers.get(name.split(".", 1)[0], ()):
            form = resolve(name)
            if form is not None:
                self._resolved[name] = form
                return form
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the listed forms."""
        return iter(self._listed)

    def __len__(self) -> int:
        """Return how many forms are listed."""
        return len(self._listed)


def _load_forms() -> InstructionForms:
    families = []
    resolvers: dict[str, tuple[Resolver, ...]] = {}
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        families.append(module.FORMS)
        for word in getattr(module, "RESOLVED_WORDS", ()):
            resolvers[word] = (*resolvers.get(word, ()), module.resolve)
    return InstructionForms(index_forms(*families), resolvers)


INSTRUCTION_FORMS = _load_forms()
