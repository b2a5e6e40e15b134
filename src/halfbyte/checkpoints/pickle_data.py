"""Pickles read as data: no name is imported, nothing is called, no object is made.

A pickle is a program for a stack machine whose opcodes may import and call anything. This reader
follows the few opcodes that tensors and dictionaries need and writes down what they *would* do: an
import is a `Name`, a call is a `Call` with its arguments, a reference to outside data is an
`Outside`. A name that no checkpoint of tensors needs is an error before anything else is looked at.

Opcode meanings: CPython's pickletools, whose own scanner takes the bytes apart.
"""

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_header import quoted

MAX_PICKLE_BYTES: Final = 256 * 2**20
_MARK: Final = object()


@dataclass(frozen=True)
class Name:
    """An imported name, e.g. "torch.bfloat16"; it stays a string."""

    text: str


@dataclass
class Call:
    """A call that was not made.

    Attributes:
        function: the dotted name that would be called.
        arguments: in order.
        state: what a BUILD opcode would set on the result.
        items: what would be stored in the result, for dictionaries.
    """

    function: str
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outside:
    """A persistent id: a reference to data beside the pickle."""

    key: Any


def read_pickle(where: str, data: bytes, allowed: Collection[str]) -> Any:
    """Return the value of a pickle: plain data, `Name`, `Call` and `Outside`.

    Args:
        where: file and member, for errors.
        data: the pickle.
        allowed: dotted names that may be imported.

    Raises:
        CheckpointError: another name, an opcode that data does not need, or damaged bytes.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{where}: a pickle of {len(data)} bytes; {MAX_PICKLE_BYTES} allowed")
    reader = _PickleReader(where, allowed)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            reader.follow(opcode.name, argument)
    except CheckpointError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{where}: damaged pickle ({error})") from error
    return reader.finish()


def describe(value: Any) -> str:
    """Return what a value of a pickle is, for an error; containers are not written out.

    A few bytes can make a list of lists whose text would not end.
    """
    if isinstance(value, Name):
        return f"the name {quoted(value.text)}"
    if isinstance(value, Call):
        return f"a call of {quoted(value.function)}"
    return quoted(value) if isinstance(value, str | int | float | None) else type(value).__name__


class _PickleReader:
    def __init__(self, where: str, allowed: Collection[str]) -> None:
        self._where = where
        self._allowed = allowed
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._is_finished = False

    def follow(self, opcode: str, argument: Any) -> None:
        if opcode in _LITERALS:
            self._stack.append(_LITERALS[opcode](argument))
        elif opcode in _IGNORED:
            return
        elif opcode in _ACTIONS:
            _ACTIONS[opcode](self, argument)
        else:
            self._fail(f"opcode {opcode}", "the opcodes of tensors and dictionaries")

    def finish(self) -> Any:
        if not self._is_finished or len(self._stack) != 1:
            self._fail(f"a stack of {len(self._stack)} values at its end", "one value and STOP")
        return self._stack[0]

    def stop(self, _: Any) -> None:
        self._is_finished = True

    def import_name(self, argument: str) -> None:
        self._push_name(argument.replace(" ", "."))

    def import_stacked(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            self._fail(f"an import of {describe(name)}", "an import of a name")
        self._push_name(f"{module}.{name}")

    def _push_name(self, text: str) -> None:
        if text not in self._allowed:
            self._fail(
                f"an import of {quoted(text)}",
                "names that tensors need; the file would run code when loaded as a pickle, and is "
                "not read: save the plain state_dict, or safetensors",
            )
        self._stack.append(Name(text))

    def call(self, _: Any) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            self._fail(f"a call of {describe(function)}", "a call of an imported name")
        self._stack.append(Call(function.text, arguments))

    def build(self, _: Any) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Call):
            target.state = state
        else:
            self._fail(f"state for {describe(target)}", "state for an object")

    def mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def _pop_marked(self) -> list[Any]:
        values: list[Any] = []
        while self._stack[-1] is not _MARK:
            values.append(self._stack.pop())
        self._stack.pop()
        return values[::-1]

    def set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._store([key, value])

    def set_items(self, _: Any) -> None:
        self._store(self._pop_marked())

    def _store(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        items = target.items if isinstance(target, Call) else target
        if not isinstance(items, dict) or len(pairs) % 2:
            self._fail(f"items for {describe(target)}", "items for a dictionary")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, str | int):
                self._fail(f"key {describe(key)}", "strings as keys")
            items[key] = value

    def append(self, _: Any) -> None:
        value = self._stack.pop()
        self._stack[-1].append(value) if isinstance(self._stack[-1], list) else self._no_list()

    def append_all(self, _: Any) -> None:
        values = self._pop_marked()
        self._stack[-1].extend(values) if isinstance(self._stack[-1], list) else self._no_list()

    def _no_list(self) -> NoReturn:
        self._fail(f"values for {describe(self._stack[-1])}", "values for a list")

    def make_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._pop_marked()))

    def pack(self, count: int) -> None:
        if len(self._stack) < count:
            self._fail("a tuple of more values than there are", f"{count} values")
        values = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        self._stack.append(values)

    def remember(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def recall(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def refer_outside(self, _: Any) -> None:
        self._stack.append(Outside(self._stack.pop()))

    def _fail(self, came: str, wanted: str) -> NoReturn:
        raise CheckpointError(f"{self._where}: the pickle has {came}, wanted {wanted}")


def _as_is(value: Any) -> Any:
    return value


_LITERALS: Final[dict[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINFLOAT"), _as_is),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _as_is),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
}
_IGNORED: Final = ("PROTO", "FRAME")
_ACTIONS: Final[dict[str, Callable[[_PickleReader, Any], None]]] = {
    "STOP": _PickleReader.stop,
    "GLOBAL": _PickleReader.import_name,
    "STACK_GLOBAL": _PickleReader.import_stacked,
    "REDUCE": _PickleReader.call,
    "NEWOBJ": _PickleReader.call,
    "BUILD": _PickleReader.build,
    "MARK": _PickleReader.mark,
    "SETITEM": _PickleReader.set_item,
    "SETITEMS": _PickleReader.set_items,
    "APPEND": _PickleReader.append,
    "APPENDS": _PickleReader.append_all,
    "TUPLE": _PickleReader.make_tuple,
    "TUPLE1": lambda reader, _: reader.pack(1),
    "TUPLE2": lambda reader, _: reader.pack(2),
    "TUPLE3": lambda reader, _: reader.pack(3),
    "BINPUT": _PickleReader.remember,
    "LONG_BINPUT": _PickleReader.remember,
    "MEMOIZE": _PickleReader.remember,
    "BINGET": _PickleReader.recall,
    "LONG_BINGET": _PickleReader.recall,
    "BINPERSID": _PickleReader.refer_outside,
}
