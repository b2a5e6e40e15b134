"""A place in a token list, with the steps every parser of PTX takes."""

from typing import NoReturn

from halfbyte.ptx.constants import decode_literal
from halfbyte.ptx.lexer import DIRECTIVE, NUMBER, STRING, WORD, Tokens
from halfbyte.ptx.syntax import Immediate, Operand, Register, Text

MAX_DEPTH = 64  # nesting of scopes, vectors, lists and parentheses: real PTX stays below 8


class Cursor:
    """The tokens, the index of the next one, and the depth of nesting there."""

    __slots__ = ("depth", "index", "kinds", "starts", "texts", "tokens", "word_operands")

    def __init__(self, tokens: Tokens) -> None:
        """Stand before the first token."""
        self.tokens = tokens
        self.kinds = tokens.kinds
        self.texts = tokens.texts
        self.starts = tokens.starts
        self.index = 0
        self.depth = 0
        self.word_operands: dict[str, Operand] = {}  # equal words share one record

    @property
    def kind(self) -> str:
        """The kind of the next token."""
        return self.kinds[self.index]

    @property
    def text(self) -> str:
        """The text of the next token."""
        return self.texts[self.index]

    @property
    def line(self) -> int:
        """The line of the next token, from 1."""
        return self.tokens.find_line(self.index)

    def fail(self, expected: str) -> NoReturn:
        """Raise PtxError: what the next token is and what was expected."""
        self.tokens.fail(self.index, expected)

    def accept(self, kind: str) -> bool:
        """Step over the next token if it is of this kind; return whether it was."""
        if self.kinds[self.index] == kind:
            self.index += 1
            return True
        return False

    def expect(self, kind: str, expected: str = "") -> str:
        """Step over the next token, which must be of this kind, and return its text."""
        if self.kinds[self.index] != kind:
            self.fail(expected or f"`{kind}`")
        self.index += 1
        return self.texts[self.index - 1]

    def is_directive(self, name: str) -> bool:
        """Return whether the next token is the directive `name` (with its dot)."""
        return self.kinds[self.index] == DIRECTIVE and self.texts[self.index] == name

    def accept_directive(self, name: str) -> bool:
        """Step over the directive `name` (with its dot); return whether it was there."""
        if self.is_directive(name):
            self.index += 1
            return True
        return False

    def expect_name(self, what: str) -> str:
        """Return an identifier, which has no dots."""
        if self.kinds[self.index] != WORD or "." in self.text or "::" in self.text:
            self.fail(what)
        self.index += 1
        return self.texts[self.index - 1]

    def expect_register(self, what: str = "a register") -> Register:
        """Return a register; a name without `%` may be one too."""
        if self.kinds[self.index] != WORD:
            self.fail(what)
        self.index += 1
        return Register(self.texts[self.index - 1])

    def expect_integer(self, what: str) -> int:
        """Return an integer literal without a sign."""
        if self.kinds[self.index] == NUMBER:
            literal = decode_literal(self.text)
            if literal is not None and not literal.is_float:
                self.index += 1
                return literal.bits
        self.fail(what)

    def expect_text(self, what: str) -> Text:
        """Return a string in double quotes."""
        return Text(self.expect(STRING, what)[1:-1])

    def expect_literal(self, what: str) -> Immediate:
        """Return a number literal without a sign."""
        literal = decode_literal(self.text) if self.kind == NUMBER else None
        if literal is None:
            self.fail(what)
        self.index += 1
        return literal

    def enter(self) -> None:
        """Note one more level of nesting; PtxError beyond MAX_DEPTH."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"at most {MAX_DEPTH} levels of nesting")

    def leave(self) -> None:
        """Note the end of a level of nesting."""
        self.depth -= 1
