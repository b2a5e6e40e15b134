"""Declarations, parameters and directives of PTX, from tokens."""

from halfbyte.ptx.constant_expressions import parse_constant
from halfbyte.ptx.constants import WARP_SIZE
from halfbyte.ptx.cursor import Cursor
from halfbyte.ptx.lexer import DIRECTIVE, NUMBER, STRING, WORD
from halfbyte.ptx.operands import parse_offset
from halfbyte.ptx.syntax import (
    TYPE_BYTES,
    Attribute,
    Declaration,
    Declarator,
    Directive,
    Immediate,
    Initializer,
    InitializerList,
    Pointer,
    SourceLocation,
    Symbol,
    SymbolOffset,
    Text,
    Variable,
)

SPACES = ("reg", "local", "shared", "global", "const", "param", "tex")
LINKAGES = ("extern", "visible", "weak", "common")
# What may stand between the parameters and the body (PTX ISA, "Performance-Tuning Directives",
# "Cluster Dimension Directives", "Miscellaneous Directives").
_HEADER_DIRECTIVES = (
    "maxnreg maxntid reqntid minnctapersm maxnctapersm noreturn pragma reqnctapercluster "
    "explicitcluster maxclusterrank blocksareclusters abi_preserve abi_preserve_control"
)
HEADER_DIRECTIVES = frozenset(_HEADER_DIRECTIVES.split())
_POINTER_SPACES = ("const", "global", "local", "shared", "param")
_MAX_VECTOR = 8


def parse_linkage(cursor: Cursor) -> str:
    """Return `extern`, `visible`, `weak` or `common` if it stands there, else ""."""
    if cursor.kind == DIRECTIVE and cursor.text[1:] in LINKAGES:
        cursor.index += 1
        return cursor.texts[cursor.index - 1][1:]
    return ""


def parse_declaration(cursor: Cursor, linkage: str = "") -> Declaration:
    """Return the declaration at the cursor, its `;` included; the linkage is behind it."""
    line = cursor.line
    space = cursor.text[1:]
    cursor.index += 1
    traits = _Traits(cursor)
    declarators = [_parse_declarator(cursor)]
    while cursor.accept(","):
        declarators.append(_parse_declarator(cursor))
    cursor.expect(";", "`,` or `;`")
    return Declaration(
        space,
        traits.type,
        tuple(declarators),
        traits.vector,
        traits.alignment,
        linkage,
        tuple(traits.attributes),
        line,
    )


class _Traits:
    """Alignment, vector length, type, attributes and pointer, in any order up to a name."""

    def __init__(self, cursor: Cursor) -> None:
        self.type = ""
        self.vector = 1
        self.alignment = 0
        self.attributes: list[Attribute] = []
        self.pointer: Pointer | None = None
        while cursor.kind == DIRECTIVE:
            self._read(cursor)
        if not self.type:
            cursor.fail("a type such as `.b32`")

    def _read(self, cursor: Cursor) -> None:
        name = cursor.text[1:]
        if name == "attribute":
            self.attributes.extend(parse_attributes(cursor))
            return
        if name in TYPE_BYTES and not self.type:
            self.type = name
        elif name[0] == "v" and name[1:].isdigit() and len(name) == 2:
            self.vector = int(name[1:])
            if not 2 <= self.vector <= _MAX_VECTOR:
                cursor.fail("`.v2`, `.v4` or `.v8`")
        elif name == "ptr" and self.type and self.pointer is None:
            self.pointer = _parse_pointer(cursor)
            return
        elif name == "align" and not self.alignment:
            self.alignment = _parse_alignment(cursor)
            return
        else:
            cursor.fail("an alignment, a type or a name")
        cursor.index += 1


def _parse_alignment(cursor: Cursor) -> int:
    cursor.index += 1
    alignment = cursor.expect_integer("an alignment in bytes")
    if alignment < 1 or alignment & (alignment - 1):
        cursor.index -= 1
        cursor.fail("an alignment that is a power of two")
    return alignment


def _parse_pointer(cursor: Cursor) -> Pointer:
    cursor.index += 1
    space = ""
    if cursor.kind == DIRECTIVE and cursor.text[1:] in _POINTER_SPACES:
        space = cursor.text[1:]
        cursor.index += 1
    return Pointer(space, _parse_alignment(cursor) if cursor.is_directive(".align") else 0)


def parse_attributes(cursor: Cursor) -> tuple[Attribute, ...]:
    """Return `.attribute(.managed, .unified(1, 2))` at the cursor, () where none stands."""
    attributes: list[Attribute] = []
    while cursor.accept_directive(".attribute"):
        cursor.expect("(")
        while True:
            name = cursor.expect(DIRECTIVE, "an attribute such as `.managed`")[1:]
            arguments: list[Immediate] = []
            if cursor.accept("("):
                arguments.append(parse_constant(cursor))
                while cursor.accept(","):
                    arguments.append(parse_constant(cursor))
                cursor.expect(")")
            attributes.append(Attribute(name, tuple(arguments)))
            if not cursor.accept(","):
                break
        cursor.expect(")", "`,` or `)`")
    return tuple(attributes)


def _parse_declarator(cursor: Cursor) -> Declarator:
    name = cursor.expect_name("a name")
    count = None
    if cursor.accept("<"):
        count = cursor.expect_integer("a number of names")
        cursor.expect(">")
    dimensions = _parse_dimensions(cursor)
    initializer = _parse_initializer(cursor) if cursor.accept("=") else None
    return Declarator(name, count, dimensions, initializer)


def _parse_dimensions(cursor: Cursor) -> tuple[int | None, ...]:
    dimensions: list[int | None] = []
    while cursor.accept("["):
        if cursor.accept("]"):
            dimensions.append(None)
            continue
        dimension = parse_constant(cursor)
        if dimension.is_float or dimension.bits < 0:
            cursor.fail("a dimension of zero or more")
        dimensions.append(dimension.bits)
        cursor.expect("]")
    return tuple(dimensions)


def _parse_initializer(cursor: Cursor) -> Initializer:
    if cursor.kind == "{":
        cursor.enter()
        cursor.index += 1
        items: list[Initializer] = []
        while cursor.kind != "}":
            items.append(_parse_initializer(cursor))
            if not cursor.accept(","):
                break
        cursor.expect("}", "`,` or `}`")
        cursor.leave()
        return InitializerList(tuple(items))
    if cursor.kind == STRING:
        return cursor.expect_text("a string")
    if cursor.kind == WORD and cursor.text != WARP_SIZE.text:
        return _parse_symbol_value(cursor)
    if cursor.kind == NUMBER and cursor.kinds[cursor.index + 1] == "(":
        mask = cursor.expect_integer("a byte mask")
        cursor.expect("(")
        inner = _parse_symbol_value(cursor)
        cursor.expect(")")
        return SymbolOffset(inner.name, inner.offset, inner.is_generic, mask)
    return parse_constant(cursor)


def _parse_symbol_value(cursor: Cursor) -> SymbolOffset:
    name = cursor.expect_name("a variable or function")
    is_generic = name == "generic" and cursor.accept("(")
    if is_generic:
        name = cursor.expect_name("a variable")
        cursor.expect(")")
    return SymbolOffset(name, parse_offset(cursor), is_generic)


def parse_parameters(cursor: Cursor) -> tuple[Variable, ...]:
    """Return the parameters in parentheses at the cursor."""
    cursor.expect("(")
    parameters: list[Variable] = []
    while cursor.kind != ")":
        if not (cursor.is_directive(".param") or cursor.is_directive(".reg")):
            cursor.fail("`.param`, `.reg` or `)`")
        line = cursor.line
        space = cursor.text[1:]
        cursor.index += 1
        traits = _Traits(cursor)
        name = cursor.expect_name("a parameter name")
        parameters.append(
            Variable(
                space,
                traits.type,
                name,
                traits.vector,
                _parse_dimensions(cursor),
                traits.alignment,
                attributes=tuple(traits.attributes),
                pointer=traits.pointer,
                line=line,
            )
        )
        if not cursor.accept(","):
            break
    cursor.expect(")", "`,` or `)`")
    return tuple(parameters)


def parse_directives(cursor: Cursor) -> tuple[Directive, ...]:
    """Return the directives between the head of a function and its body."""
    directives: list[Directive] = []
    while cursor.kind == DIRECTIVE:
        if cursor.text[1:] not in HEADER_DIRECTIVES:
            cursor.fail("a directive of a kernel or function, `{` or `;`")
        directives.append(parse_directive(cursor))
    return tuple(directives)


def parse_directive(cursor: Cursor) -> Directive:
    """Return the directive at the cursor with its arguments; `.pragma` ends with a `;`."""
    line = cursor.line
    name = cursor.text[1:]
    cursor.index += 1
    arguments: list[Immediate | Text | Symbol] = []
    if cursor.kind in (NUMBER, STRING):
        arguments.append(_parse_argument(cursor))
        while cursor.accept(","):
            arguments.append(_parse_argument(cursor))
    if name == "pragma":
        if not arguments:
            cursor.fail("a string")
        cursor.expect(";")
    return Directive(name, tuple(arguments), line)


def _parse_argument(cursor: Cursor) -> Immediate | Text:
    if cursor.kind == STRING:
        return cursor.expect_text("a string")
    return cursor.expect_literal("a number or a string")


def parse_location(cursor: Cursor) -> SourceLocation:
    """Return the `.loc` at the cursor, which ends without a `;`."""
    cursor.index += 1
    file, line, column = _parse_three(cursor)
    name, offset = "", 0
    inlined_at = None
    while cursor.accept(","):
        word = cursor.expect_name("`function_name` or `inlined_at`")
        if word == "function_name":
            name = cursor.expect_name("a label")
            offset = parse_offset(cursor)
        elif word == "inlined_at":
            inlined_at = SourceLocation(*_parse_three(cursor))
        else:
            cursor.index -= 1
            cursor.fail("`function_name` or `inlined_at`")
    return SourceLocation(file, line, column, name, offset, inlined_at)


def _parse_three(cursor: Cursor) -> tuple[int, int, int]:
    return (
        cursor.expect_integer("a file index"),
        cursor.expect_integer("a line number"),
        cursor.expect_integer("a column"),
    )
