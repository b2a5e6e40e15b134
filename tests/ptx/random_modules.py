"""Random syntax trees: modules that no compiler would write, yet all of them PTX."""

from hypothesis import strategies as st

from halfbyte.ptx import syntax as tree
from halfbyte.ptx.constants import WARP_SIZE, decode_literal

NAMES = st.from_regex(r"[a-zA-Z][a-zA-Z0-9_$]{0,6}|[_$][a-zA-Z0-9_$]{1,6}", fullmatch=True).filter(
    lambda name: name not in ("WARP_SZ", "generic")
)
REGISTERS = st.from_regex(r"%[a-z]{1,3}[0-9]{0,3}", fullmatch=True).map(tree.Register)
TYPES = st.sampled_from(["b8", "u16", "s32", "f32", "b64", "b128", "f16x2"])
ALIGNMENTS = st.sampled_from([0, 1, 4, 16, 1024])
SINK = tree.Sink()
OFFSETS = st.integers(-(2**31), 2**31)
COUNTS = st.integers(0, 2**32)


def make_literal(text: str) -> tree.Immediate:
    literal = decode_literal(text)
    assert literal is not None
    return literal


LITERALS = st.one_of(
    st.integers(0, 2**64 - 1).map(lambda value: make_literal(str(value))),
    st.integers(0, 2**64 - 1).map(lambda value: make_literal(f"{value:#x}U")),
    st.integers(0, 2**32 - 1).map(lambda value: make_literal(f"0f{value:08x}")),
    st.integers(0, 2**64 - 1).map(lambda value: make_literal(f"0D{value:016X}")),
    st.floats(0, 1e300).map(lambda value: make_literal(f"{value:e}")),
)
IMMEDIATES = LITERALS | st.just(WARP_SIZE)
SYMBOLS = NAMES.map(tree.Symbol)
SYMBOL_OFFSETS = st.builds(tree.SymbolOffset, NAMES, OFFSETS.filter(bool))
ADDRESSES = st.builds(tree.Address, REGISTERS | SYMBOLS, OFFSETS, st.booleans())
PLAIN_ADDRESSES = st.builds(tree.Address, REGISTERS | SYMBOLS, OFFSETS)
VECTOR_ITEMS = REGISTERS | st.just(SINK) | IMMEDIATES
VECTORS = st.lists(VECTOR_ITEMS, max_size=4).map(lambda items: tree.Vector(tuple(items)))
OPERANDS: st.SearchStrategy[tree.Operand] = st.one_of(
    REGISTERS,
    IMMEDIATES,
    SYMBOLS,
    SYMBOL_OFFSETS,
    ADDRESSES,
    VECTORS,
    st.just(SINK),
    st.builds(tree.Negated, REGISTERS),
    st.builds(tree.Pair, REGISTERS | st.just(SINK), REGISTERS | st.just(SINK)),
    st.builds(tree.Element, REGISTERS, st.sampled_from(["x", "b0", "h1"])),
    st.builds(tree.TensorAddress, PLAIN_ADDRESSES, VECTORS),
    st.builds(tree.TensorAddress, PLAIN_ADDRESSES, REGISTERS, st.tuples(VECTORS)),
)
OPCODES = st.from_regex(r"[a-z]{2,6}(\.[a-z0-9_]{1,5}(::[a-z]{1,4})?){0,3}", fullmatch=True).filter(
    lambda opcode: not opcode.startswith("call")
)
GUARDS = st.none() | st.builds(tree.Guard, REGISTERS, st.booleans())
PLAIN_INSTRUCTIONS = st.builds(
    tree.Instruction, OPCODES, st.lists(OPERANDS, max_size=5).map(tuple), GUARDS
)
ARGUMENTS = st.lists(REGISTERS | SYMBOLS | IMMEDIATES, max_size=3).map(
    lambda items: tree.ArgumentList(tuple(items))
)
CALLS = st.builds(
    tree.Instruction,
    st.sampled_from(["call", "call.uni"]),
    st.tuples(ARGUMENTS, SYMBOLS | REGISTERS, ARGUMENTS) | st.tuples(SYMBOLS, ARGUMENTS),
    GUARDS,
)
DIMENSIONS = st.lists(st.none() | COUNTS, max_size=2).map(tuple)
INITIALIZERS = st.recursive(
    IMMEDIATES
    | st.builds(tree.SymbolOffset, NAMES, OFFSETS, st.booleans())
    | st.builds(tree.SymbolOffset, NAMES, OFFSETS, st.booleans(), st.integers(0, 2**64 - 1)),
    lambda inner: st.lists(inner, max_size=3).map(lambda items: tree.InitializerList(tuple(items))),
    max_leaves=5,
)
DECLARATORS = st.builds(tree.Declarator, NAMES, st.none(), DIMENSIONS, st.none() | INITIALIZERS)
DECLARATIONS = st.builds(
    tree.Declaration,
    st.sampled_from(["local", "shared", "global", "const", "param"]),
    TYPES,
    st.lists(DECLARATORS, min_size=1, max_size=3).map(tuple),
    st.sampled_from([1, 2, 4]),
    ALIGNMENTS,
    st.sampled_from(["", "extern", "visible", "weak", "common"]),
)
REGISTER_DECLARATIONS = st.builds(
    tree.Declaration,
    st.just("reg"),
    TYPES | st.just("pred"),
    st.lists(
        st.builds(tree.Declarator, REGISTERS.map(lambda r: r.name) | NAMES, st.none() | COUNTS),
        min_size=1,
        max_size=3,
    ).map(tuple),
)
LOCATIONS = st.builds(
    tree.SourceLocation,
    COUNTS,
    COUNTS,
    COUNTS,
    inlined_at=st.none() | st.builds(tree.SourceLocation, COUNTS, COUNTS, COUNTS),
)
TARGETS = st.lists(NAMES, min_size=1, max_size=3).map(tuple)
STATEMENTS: st.SearchStrategy[tree.Statement] = st.one_of(
    PLAIN_INSTRUCTIONS,
    CALLS,
    DECLARATIONS,
    REGISTER_DECLARATIONS,
    st.builds(tree.Label, NAMES),
    st.builds(tree.BranchTargets, NAMES, TARGETS),
    st.builds(tree.CallTargets, NAMES, TARGETS),
)
SCOPES = st.recursive(
    st.lists(STATEMENTS, max_size=6).map(lambda items: tree.Scope(tuple(items))),
    lambda inner: st.lists(STATEMENTS | inner, max_size=3).map(
        lambda items: tree.Scope(tuple(items))
    ),
    max_leaves=4,
)
POINTERS = st.none() | st.builds(
    tree.Pointer, st.sampled_from(["", "global", "shared"]), ALIGNMENTS
)
PARAMETERS = st.lists(
    st.builds(
        tree.Variable,
        st.just("param"),
        TYPES,
        NAMES,
        st.sampled_from([1, 2]),
        DIMENSIONS,
        ALIGNMENTS,
        pointer=POINTERS,
    ),
    max_size=3,
).map(tuple)
DIRECTIVES = st.lists(
    st.one_of(
        st.builds(
            tree.Directive,
            st.sampled_from(["reqntid", "maxntid", "reqnctapercluster"]),
            st.lists(COUNTS.map(lambda n: make_literal(str(n))), min_size=1, max_size=3).map(tuple),
        ),
        st.just(tree.Directive("noreturn")),
        st.just(tree.Directive("pragma", (tree.Text("nounroll"),))),
    ),
    max_size=3,
).map(tuple)
KERNELS = st.builds(
    tree.Kernel, NAMES, PARAMETERS, DIRECTIVES, st.none() | SCOPES, st.sampled_from(["", "visible"])
)
FUNCTIONS = st.builds(
    tree.Function, NAMES, PARAMETERS, DIRECTIVES, st.none() | SCOPES, returns=PARAMETERS
)
ITEMS: st.SearchStrategy[tree.ModuleItem] = st.one_of(
    DECLARATIONS,
    KERNELS,
    FUNCTIONS,
    st.builds(tree.SourceFile, COUNTS, NAMES, st.lists(COUNTS, max_size=2).map(tuple)),
    st.builds(tree.Alias, NAMES, NAMES),
    LOCATIONS,
)
MODULES = st.builds(
    tree.Module,
    st.just("9.0"),
    st.lists(NAMES, min_size=1, max_size=2).map(tuple),
    st.sampled_from([32, 64]),
    st.lists(ITEMS, max_size=4).map(tuple),
)
