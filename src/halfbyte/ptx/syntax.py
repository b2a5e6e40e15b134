"""The syntax tree of PTX text: frozen records, one per construct, in the spelling of PTX.

Two trees are equal when the programs are: `line` and `text` (where a construct came from) do not
take part in comparisons. Names are as written; `scopes.resolve` makes them unique.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from halfbyte.errors import printable

_SHOWN_CHARACTERS = 160  # of an instruction in a message

# Bytes of one element of every PTX type that memory can hold (PTX ISA, "Types").
TYPE_BYTES = {
    **dict.fromkeys(("b8", "u8", "s8", "e4m3", "e5m2"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 8),
    "b128": 16,
    "pred": 1,
    **dict.fromkeys(("texref", "samplerref", "surfref"), 8),
}


@dataclass(frozen=True, slots=True)
class Register:
    """A register, special ones (`%tid.x`) included; `name` keeps its percent sign and dots."""

    name: str


@dataclass(frozen=True, slots=True)
class Element:
    """A part of a register: `v.x` of a vector register, or `%r1.b0` / `%r1.h1` of video forms."""

    register: Register
    component: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant. `text` is its spelling.

    An integer has `float_bits` 0 and its value in `bits`, negative if the text is. A float has
    `float_bits` 32 (`0f...`) or 64 (`0d...`, `1.5`) and its raw bit pattern in `bits`.
    """

    text: str
    bits: int
    float_bits: int = 0

    @property
    def is_float(self) -> bool:
        """Whether `bits` is the pattern of a floating-point number."""
        return self.float_bits != 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that is no register: function, variable, parameter, label, branch table."""

    name: str


@dataclass(frozen=True, slots=True)
class SymbolOffset:
    """`name+4` outside brackets (`mov.u64 %rd1, name+4`) or `generic(name)+4` in initialisers."""

    name: str
    offset: int = 0  # bytes
    is_generic: bool = False
    mask: int | None = None  # `0xff00(name)`: this byte of the address


@dataclass(frozen=True, slots=True)
class Sink:
    """The operand `_`: a result nobody wants."""


@dataclass(frozen=True, slots=True)
class Negated:
    """`!%p`."""

    register: Register


@dataclass(frozen=True, slots=True)
class Pair:
    """`first|second`: a result and its second predicate; either may be a `Sink`."""

    first: Register | Sink
    second: Register | Sink


@dataclass(frozen=True, slots=True)
class Address:
    """`[target+offset]`; the offset counts bytes. `is_unified` is the suffix `.unified`."""

    target: "Register | Element | Symbol | Immediate"
    offset: int = 0
    is_unified: bool = False


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple["Operand", ...]


@dataclass(frozen=True, slots=True)
class TensorAddress:
    """`[map, {c0, c1}]`; `extra` holds what follows further commas (`[texture, sampler, {u}]`)."""

    tensor_map: Address
    coordinates: "Operand"
    extra: tuple["Operand", ...] = ()


@dataclass(frozen=True, slots=True)
class ArgumentList:
    """`(a, b)` of a call: its results or its arguments."""

    items: tuple["Operand", ...]


Operand: TypeAlias = (
    Register
    | Element
    | Immediate
    | Symbol
    | SymbolOffset
    | Sink
    | Negated
    | Pair
    | Address
    | Vector
    | TensorAddress
    | ArgumentList
)


@dataclass(frozen=True, slots=True)
class Guard:
    """`@%p` or `@!%p` before an instruction."""

    register: Register
    negated: bool = False


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A `.loc`: file index (see `Module.files`), line and column of the source program."""

    file: int
    line: int
    column: int
    function_name: str = ""  # label of the name in `.section .debug_str`
    function_offset: int = 0
    inlined_at: "SourceLocation | None" = None


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; `opcode` is its full dotted text, `line` and `text` where it stands."""

    opcode: str
    operands: tuple[Operand, ...] = ()
    guard: Guard | None = None
    line: int = field(default=0, compare=False)
    location: SourceLocation | None = None
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Return the source text on one line, fit for a message: cut and escaped."""
        line = printable(" ".join(self.text[: 2 * _SHOWN_CHARACTERS].split())) or self.opcode
        return line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + "..."


@dataclass(frozen=True, slots=True)
class Label:
    """`name:`."""

    name: str
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Text:
    """A string in double quotes, as written, without the quotes."""

    value: str


@dataclass(frozen=True, slots=True)
class InitializerList:
    """`{1, 2, {3}}` after `=`."""

    items: tuple["Initializer", ...]


Initializer: TypeAlias = Immediate | SymbolOffset | Text | InitializerList


@dataclass(frozen=True, slots=True)
class Pointer:
    """`.ptr .global .align 16` of a parameter; space "" is generic, alignment 0 was not written."""

    space: str = ""
    alignment: int = 0


@dataclass(frozen=True, slots=True)
class Attribute:
    """`.attribute(.managed)`, `.attribute(.unified(1, 2))`."""

    name: str
    arguments: tuple[Immediate, ...] = ()


@dataclass(frozen=True, slots=True)
class Declarator:
    """A name in a declaration: `%r<100>` has count 100, `x[2][]` dimensions (2, None)."""

    name: str
    count: int | None = None
    dimensions: tuple[int | None, ...] = ()
    initializer: Initializer | None = None


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable or parameter of memory (or a `.reg` parameter of a function)."""

    space: str  # reg, local, shared, global, const, param, tex
    type: str
    name: str
    vector: int = 1
    dimensions: tuple[int | None, ...] = ()
    alignment: int = 0  # as written; 0: not written
    initializer: Initializer | None = None
    linkage: str = ""
    attributes: tuple[Attribute, ...] = ()
    pointer: Pointer | None = None
    line: int = field(default=0, compare=False)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element, a whole vector for `.v2`/`.v4`."""
        return TYPE_BYTES[self.type] * self.vector

    @property
    def size_bytes(self) -> int:
        """Bytes of the variable; an open dimension `[]` counts as its initialiser does, or 0."""
        count = 1
        for dimension in self.dimensions:
            count *= self._open_length() if dimension is None else dimension
        return count * self.element_bytes

    @property
    def alignment_bytes(self) -> int:
        """The alignment: as written, or the natural one of an element."""
        return self.alignment or self.element_bytes

    def _open_length(self) -> int:
        if isinstance(self.initializer, InitializerList):
            return len(self.initializer.items)
        if isinstance(self.initializer, Text):
            return len(self.initializer.value) + 1
        return 0


@dataclass(frozen=True, slots=True)
class Declaration:
    """`.shared .align 16 .b8 a[4], b;`: one statement, several names."""

    space: str
    type: str
    declarators: tuple[Declarator, ...]
    vector: int = 1
    alignment: int = 0
    linkage: str = ""
    attributes: tuple[Attribute, ...] = ()
    line: int = field(default=0, compare=False)

    def __iter__(self) -> Iterator[Variable]:
        """Yield each declared name as a Variable; a `%r<100>` comes as its prefix."""
        for declarator in self.declarators:
            yield Variable(
                self.space,
                self.type,
                declarator.name,
                self.vector,
                declarator.dimensions,
                self.alignment,
                declarator.initializer,
                self.linkage,
                self.attributes,
                None,
                self.line,
            )


@dataclass(frozen=True, slots=True)
class Directive:
    """`.reqntid 192, 1, 1`, `.pragma "nounroll"`, `.noreturn`; the name without its dot."""

    name: str
    arguments: tuple[Immediate | Text | Symbol, ...] = ()
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class BranchTargets:
    """`name: .branchtargets L0, L1;`, the table of a `brx.idx`."""

    name: str
    labels: tuple[str, ...]
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class CallTargets:
    """`name: .calltargets f, g;`, what an indirect call may reach."""

    name: str
    functions: tuple[str, ...]
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class CallPrototype:
    """`name: .callprototype (.param .b32 _) _ (.param .b64 _);`, the shape of an indirect call."""

    name: str
    returns: tuple[Variable, ...]
    parameters: tuple[Variable, ...]
    function: str = "_"
    directives: tuple[Directive, ...] = ()
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Scope:
    """`{ ... }` inside a body: its registers, variables and labels are its own."""

    statements: tuple["Statement", ...]
    line: int = field(default=0, compare=False)


Statement: TypeAlias = (
    Instruction
    | Label
    | Declaration
    | Scope
    | SourceLocation
    | Directive
    | BranchTargets
    | CallTargets
    | CallPrototype
)


@dataclass(frozen=True, slots=True)
class _Definition:
    """What an `.entry` and a `.func` have in common. `body` is None for a prototype."""

    name: str
    parameters: tuple[Variable, ...] = ()
    directives: tuple[Directive, ...] = ()
    body: Scope | None = None
    linkage: str = ""
    attributes: tuple[Attribute, ...] = ()
    has_parameter_list: bool = True
    line: int = field(default=0, compare=False)

    def find_directive(self, name: str) -> tuple[int, ...] | None:
        """Return the integers of `.name` (`()` if it has none), None where it is absent."""
        for directive in self.directives:
            if directive.name == name:
                return tuple(a.bits for a in directive.arguments if isinstance(a, Immediate))
        return None


@dataclass(frozen=True, slots=True)
class Kernel(_Definition):
    """An `.entry`."""


@dataclass(frozen=True, slots=True)
class Function(_Definition):
    """A `.func`; `returns` are its return parameters."""

    returns: tuple[Variable, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """`.file 1 "name"`, with time stamp and size where written."""

    index: int
    name: str
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """`.section .debug_str { ... }` as its tokens; its meaning is DWARF, not PTX."""

    name: str
    tokens: tuple[str, ...]
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Alias:
    """`.alias name, target;`."""

    name: str
    target: str
    line: int = field(default=0, compare=False)


ModuleItem: TypeAlias = (
    Declaration | Kernel | Function | SourceFile | Section | Alias | Directive | SourceLocation
)


@dataclass(frozen=True, slots=True)
class Module:
    """A PTX module: its header and its items in the order of the text."""

    version: str  # "8.8"
    target: tuple[str, ...]  # ("sm_100a", "debug")
    address_size: int = 32  # PTX ISA: the default where `.address_size` is absent
    items: tuple[ModuleItem, ...] = ()

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The entries, declarations without a body included."""
        return tuple(item for item in self.items if isinstance(item, Kernel))

    @property
    def functions(self) -> tuple[Function, ...]:
        """The functions, prototypes included."""
        return tuple(item for item in self.items if isinstance(item, Function))

    @property
    def globals(self) -> tuple[Variable, ...]:
        """The variables of module scope, of every space."""
        return tuple(
            variable for item in self.items if isinstance(item, Declaration) for variable in item
        )

    @property
    def files(self) -> dict[int, str]:
        """File names by the index that `SourceLocation.file` uses."""
        return {item.index: item.name for item in self.items if isinstance(item, SourceFile)}

    def find_kernel(self, name: str) -> Kernel:
        """Return the entry of that name; KeyError naming the entries there are."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise KeyError(f"no entry {name!r}; the module has {[k.name for k in self.kernels]}")
