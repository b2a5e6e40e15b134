"""PTX text to a `syntax.Module`, by recursive descent over the token list."""

from typing import Any

from halfbyte.ptx.cursor import Cursor
from halfbyte.ptx.declarations import (
    SPACES,
    parse_attributes,
    parse_declaration,
    parse_directive,
    parse_directives,
    parse_linkage,
    parse_location,
    parse_parameters,
)
from halfbyte.ptx.lexer import DIRECTIVE, END, NUMBER, STRING, WORD, tokenize
from halfbyte.ptx.operands import parse_call_operand, parse_operand
from halfbyte.ptx.syntax import (
    Alias,
    BranchTargets,
    CallPrototype,
    CallTargets,
    Function,
    Guard,
    Instruction,
    Kernel,
    Label,
    Module,
    ModuleItem,
    Operand,
    Scope,
    Section,
    SourceFile,
    SourceLocation,
    Statement,
)

_ADDRESS_SIZES = (32, 64)  # bits


def parse(text: str) -> Module:
    """Return the module that `text` spells.

    Raises PtxError, which names line, column, what stands there and what was expected.
    """
    cursor = Cursor(tokenize(text))
    if not cursor.accept_directive(".version"):
        cursor.fail("`.version` at the start of a PTX module")
    version = cursor.expect(NUMBER, "a version such as 8.8")
    if not cursor.accept_directive(".target"):
        cursor.fail("`.target`")
    target = [cursor.expect_name("a target such as sm_100a")]
    while cursor.accept(","):
        target.append(cursor.expect_name("a target"))
    address_size = 32
    if cursor.accept_directive(".address_size"):
        address_size = cursor.expect_integer("32 or 64")
        if address_size not in _ADDRESS_SIZES:
            cursor.index -= 1
            cursor.fail("32 or 64")
    items: list[ModuleItem] = []
    while cursor.kind != END:
        items.append(_parse_item(cursor))
    return Module(version, tuple(target), address_size, tuple(items))


def _parse_item(cursor: Cursor) -> ModuleItem:
    linkage = parse_linkage(cursor)
    if cursor.kind == DIRECTIVE:
        name = cursor.text[1:]
        if name == "entry":
            return _parse_kernel(cursor, linkage)
        if name == "func":
            return _parse_function(cursor, linkage)
        if name in SPACES:
            return parse_declaration(cursor, linkage)
        if not linkage:
            if name == "file":
                return _parse_file(cursor)
            if name == "section":
                return _parse_section(cursor)
            if name == "alias":
                return _parse_alias(cursor)
            if name == "pragma":
                return parse_directive(cursor)
            if name == "loc":
                return parse_location(cursor)
    cursor.fail("a declaration, `.entry`, `.func` or another directive of module scope")


def _parse_kernel(cursor: Cursor, linkage: str) -> Kernel:
    line = cursor.line
    cursor.index += 1
    attributes = parse_attributes(cursor)
    return Kernel(**_parse_signature(cursor), linkage=linkage, attributes=attributes, line=line)


def _parse_function(cursor: Cursor, linkage: str) -> Function:
    line = cursor.line
    cursor.index += 1
    attributes = parse_attributes(cursor)
    returns = parse_parameters(cursor) if cursor.kind == "(" else ()
    signature = _parse_signature(cursor)
    return Function(**signature, linkage=linkage, attributes=attributes, line=line, returns=returns)


def _parse_signature(cursor: Cursor) -> dict[str, Any]:
    """Return the fields from the name to the body, alike in kernels and functions."""
    name = cursor.expect_name("the name of the kernel or function")
    has_list = cursor.kind == "("
    return {
        "name": name,
        "has_parameter_list": has_list,
        "parameters": parse_parameters(cursor) if has_list else (),
        "directives": parse_directives(cursor),
        "body": _parse_body(cursor),
    }


def _parse_body(cursor: Cursor) -> Scope | None:
    if cursor.accept(";"):
        return None
    if cursor.kind != "{":
        cursor.fail("a directive of a kernel or function, `{` or `;`")
    return _BodyParser(cursor).parse_scope()


def _parse_file(cursor: Cursor) -> SourceFile:
    cursor.index += 1
    index = cursor.expect_integer("a file index")
    name = cursor.expect_text("a file name").value
    numbers: list[int] = []
    while cursor.accept(","):
        numbers.append(cursor.expect_integer("a time stamp or size"))
    return SourceFile(index, name, tuple(numbers))


def _parse_section(cursor: Cursor) -> Section:
    line = cursor.line
    cursor.index += 1
    name = cursor.text
    if cursor.kind not in (DIRECTIVE, WORD):
        cursor.fail("the name of the section")
    cursor.index += 1
    cursor.expect("{")
    start = cursor.index
    while cursor.kind != "}":
        if cursor.kind not in (DIRECTIVE, WORD, NUMBER, STRING, ",", ":", "+", "-", "(", ")"):
            cursor.fail("`}` after the data of the section")
        cursor.index += 1
    cursor.index += 1
    return Section(name, tuple(cursor.texts[start : cursor.index - 1]), line)


def _parse_alias(cursor: Cursor) -> Alias:
    line = cursor.line
    cursor.index += 1
    name = cursor.expect_name("a name")
    cursor.expect(",")
    target = cursor.expect_name("a function")
    cursor.expect(";")
    return Alias(name, target, line)


class _BodyParser:
    """Reads the body of one kernel or function; remembers the `.loc` in force."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.location: SourceLocation | None = None

    def parse_scope(self) -> Scope:
        """Return the `{ ... }` at the cursor."""
        cursor = self.cursor
        kinds = cursor.kinds
        line = cursor.line
        cursor.enter()
        cursor.index += 1
        statements: list[Statement] = []
        while (kind := kinds[cursor.index]) != "}":
            if kind == WORD:
                if kinds[cursor.index + 1] == ":":
                    statements.append(self._parse_label())
                else:
                    statements.append(self._parse_instruction(None, cursor.index))
            elif kind == "@":
                statements.append(self._parse_guarded())
            elif kind == DIRECTIVE:
                statements.append(self._parse_directive())
            elif kind == "{":
                statements.append(self.parse_scope())
            elif kind == ";":
                cursor.index += 1
            else:
                cursor.fail("an instruction, a label, a directive or `}`")
        cursor.index += 1
        cursor.leave()
        return Scope(tuple(statements), line)

    def _parse_guarded(self) -> Instruction:
        cursor = self.cursor
        start = cursor.index
        cursor.index += 1
        negated = cursor.accept("!")
        guard = Guard(cursor.expect_register("a predicate register"), negated)
        return self._parse_instruction(guard, start)

    def _parse_instruction(self, guard: Guard | None, start: int) -> Instruction:
        cursor = self.cursor
        kinds = cursor.kinds
        if kinds[cursor.index] != WORD:
            cursor.fail("an instruction")
        opcode = cursor.texts[cursor.index]
        cursor.index += 1
        while kinds[cursor.index] == DIRECTIVE:  # `add .s32`
            opcode += cursor.texts[cursor.index]
            cursor.index += 1
        parse_one = parse_operand
        if opcode.startswith("call") and opcode[4:5] in ("", "."):
            parse_one = parse_call_operand
        operands: list[Operand] = []
        if kinds[cursor.index] != ";":
            operands.append(parse_one(cursor))
            while kinds[cursor.index] == ",":
                cursor.index += 1
                operands.append(parse_one(cursor))
            if kinds[cursor.index] != ";":
                cursor.fail("`,` or `;`")
        end = cursor.starts[cursor.index] + 1
        cursor.index += 1
        text = cursor.tokens.source[cursor.starts[start] : end]
        line = cursor.tokens.find_line(start)
        return Instruction(opcode, tuple(operands), guard, line, self.location, text)

    def _parse_label(self) -> Statement:
        cursor = self.cursor
        line = cursor.line
        name = cursor.expect_name("a label")
        cursor.index += 1
        if cursor.accept_directive(".branchtargets"):
            return BranchTargets(name, self._parse_names("a label"), line)
        if cursor.accept_directive(".calltargets"):
            return CallTargets(name, self._parse_names("a function"), line)
        if cursor.accept_directive(".callprototype"):
            return self._parse_prototype(name, line)
        return Label(name, line)

    def _parse_names(self, what: str) -> tuple[str, ...]:
        names = [self.cursor.expect_name(what)]
        while self.cursor.accept(","):
            names.append(self.cursor.expect_name(what))
        self.cursor.expect(";", "`,` or `;`")
        return tuple(names)

    def _parse_prototype(self, name: str, line: int) -> CallPrototype:
        cursor = self.cursor
        returns = parse_parameters(cursor) if cursor.kind == "(" else ()
        function = cursor.expect_name("`_`")
        parameters = parse_parameters(cursor) if cursor.kind == "(" else ()
        directives = parse_directives(cursor)
        cursor.expect(";")
        return CallPrototype(name, returns, parameters, function, directives, line)

    def _parse_directive(self) -> Statement:
        cursor = self.cursor
        name = cursor.text[1:]
        if name == "loc":
            self.location = parse_location(cursor)
            return self.location
        if name == "pragma":
            return parse_directive(cursor)
        linkage = parse_linkage(cursor)
        if cursor.kind == DIRECTIVE and cursor.text[1:] in SPACES:
            return parse_declaration(cursor, linkage)
        cursor.fail("a declaration, `.loc`, `.pragma` or an instruction")
