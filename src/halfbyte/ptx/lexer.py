"""PTX text to tokens, by one regular expression.

A word carries its dotted tail (`add.s32`, `%tid.x`, `cp.async.bulk.shared::cluster`), since only
the place in the grammar tells an opcode from a register; a directive is one dotted part.
Comments, white space and line markers of a preprocessor are skipped.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NoReturn

from halfbyte.errors import PtxError, printable

WORD = "word"
DIRECTIVE = "directive"
NUMBER = "number"
STRING = "string"
END = "end"
BAD = "bad"
_SHOWN_CHARACTERS = 60

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<word>(?:[A-Za-z_$]|%[\w$])[\w$]*(?:(?:\.|::)[\w$]+)*)
    | (?P<number>0[fF][0-9a-fA-F]{8}(?![\w$])
        | 0[dD][0-9a-fA-F]{16}(?![\w$])
        | (?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w$])
        | \d+[eE][+-]?\d+(?![\w$])
        | \d[\w$]*)
    | (?P<directive>\.[A-Za-z_][\w$]*(?:::\w+)?)
    | (?P<skip>//[^\n]*|/\*.*?\*/|^\#[ \t]*(?:line\b|\d)[^\n]*)
    | (?P<string>"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*")
    | (?P<mark>(?!/\*)(?:<<|>>|&&|\|\||[=!<>]=|[][{}(),;:@|!+\-*/%~<>=&^?]))
    | (?P<end>\Z)
    | (?P<bad>/\*|.)
    )""",
    re.ASCII | re.VERBOSE | re.DOTALL | re.MULTILINE,
)


@dataclass(slots=True)
class Tokens:
    """The tokens of a text in parallel lists, closed by one of kind `end`.

    A mark (`;`, `[`, ...) is its own kind; `starts` are character offsets into `source`.
    """

    source: str
    kinds: list[str]
    texts: list[str]
    starts: list[int]
    _newlines: list[int] = field(default_factory=list)

    def find_line(self, index: int) -> int:
        """Return the line of token `index`, from 1."""
        if not self._newlines:
            self._newlines = [match.start() for match in re.finditer("\n", self.source)] or [
                len(self.source) + 1
            ]
        return bisect_right(self._newlines, self.starts[index]) + 1

    def fail(self, index: int, expected: str) -> NoReturn:
        """Raise PtxError: what stands at token `index` and what was expected there."""
        start = self.starts[index]
        column = start - (self.source.rfind("\n", 0, start) + 1) + 1
        found = "the end of the text" if self.kinds[index] == END else repr(self._shown(index))
        line = self.find_line(index)
        raise PtxError(f"line {line}, column {column}: found {found}, expected {expected}", line)

    def _shown(self, index: int) -> str:
        text = printable(self.texts[index])
        return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def tokenize(source: str) -> Tokens:
    """Return the tokens of `source`; PtxError at a character or an unclosed string or comment."""
    kinds: list[str] = []
    texts: list[str] = []
    starts: list[int] = []
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup or BAD
        if kind == "skip":
            continue
        text = match[kind]
        texts.append(text)
        starts.append(match.start(kind))
        kinds.append(text if kind == "mark" else kind)
        if kind in (END, BAD):
            break
    tokens = Tokens(source, kinds, texts, starts)
    if kinds[-1] == BAD:
        tokens.fail(len(kinds) - 1, _describe_wanted(texts[-1]))
    return tokens


def _describe_wanted(bad: str) -> str:
    if bad == "/*":
        return "a comment that is closed by `*/`"
    return "a string that is closed on its line" if bad == '"' else "PTX text"
