"""What the parser makes of single constructs."""

import pytest

from halfbyte.errors import PtxError
from halfbyte.ptx.parser import parse
from halfbyte.ptx.syntax import (
    Address,
    ArgumentList,
    BranchTargets,
    CallPrototype,
    Declaration,
    Element,
    Guard,
    Immediate,
    InitializerList,
    Instruction,
    Kernel,
    Label,
    Negated,
    Operand,
    Pair,
    Pointer,
    Register,
    Scope,
    Sink,
    SourceLocation,
    Symbol,
    SymbolOffset,
    TensorAddress,
    Vector,
)
from tests.ptx.texts import HEADER, KITCHEN_SINK, make_kernel

R1, R2 = Register("%r1"), Register("%r2")


def parse_statements(body: str) -> tuple[object, ...]:
    scope = parse(make_kernel(body, "")).kernels[0].body
    assert scope is not None
    return scope.statements


def parse_instruction(text: str) -> Instruction:
    (instruction,) = parse_statements(text)
    assert isinstance(instruction, Instruction)
    return instruction


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("%r1", R1),
        ("%tid.x", Register("%tid.x")),
        ("%r1.b2", Element(R1, "b2")),
        ("v.x", Element(Register("v"), "x")),
        ("name", Symbol("name")),
        ("name+4", SymbolOffset("name", 4)),
        ("_", Sink()),
        ("WARP_SZ", Immediate("WARP_SZ", 32)),
        ("!%p1", Negated(Register("%p1"))),
        ("!P1", Negated(Register("P1"))),
        ("%r1|%r2", Pair(R1, R2)),
        ("%r1|_", Pair(R1, Sink())),
        ("P|Q", Pair(Register("P"), Register("Q"))),
        ("[%r1]", Address(R1)),
        ("[%r1+-8]", Address(R1, -8)),
        ("[%r1 - 8]", Address(R1, -8)),
        ("[%r1+0x10+4*2]", Address(R1, 24)),
        ("[name+4]", Address(Symbol("name"), 4)),
        ("[16]", Address(Immediate("16", 16))),
        ("[%r1].unified", Address(R1, 0, True)),
        ("{%r1, _, 0f3F800000}", Vector((R1, Sink(), Immediate("0f3F800000", 0x3F800000, 32)))),
        ("[%r1, {%r2}]", TensorAddress(Address(R1), Vector((R2,)))),
        ("[%r1, %r2, {1}]", TensorAddress(Address(R1), R2, (Vector((Immediate("1", 1),)),))),
    ],
)
def test_an_operand_becomes_its_record(text: str, operand: Operand) -> None:
    assert parse_instruction(f"op {text};").operands == (operand,)
    assert parse_instruction(f"op %r1, {text}, 1;").operands[1] == operand


def test_an_instruction_keeps_guard_line_and_text() -> None:
    instruction = parse_instruction("\n@!%p1  add.s32\n%r1, %r2, 1; // sum")
    assert instruction.guard == Guard(Register("%p1"), True)
    assert instruction.opcode == "add.s32"
    assert instruction.text == "@!%p1  add.s32\n%r1, %r2, 1;"
    assert instruction.line == HEADER.count("\n") + 5


def test_spaces_inside_an_opcode_do_not_matter() -> None:
    assert parse_instruction("ld .global .b32 %r1, [%r2];").opcode == "ld.global.b32"


def test_parentheses_of_a_call_are_lists() -> None:
    call = parse_instruction("call.uni (%r1), fn, (%r2, 5, p);")
    arguments = ArgumentList((R2, Immediate("5", 5), Symbol("p")))
    assert call.operands == (ArgumentList((R1,)), Symbol("fn"), arguments)
    assert parse_instruction("call fn, ();").operands == (Symbol("fn"), ArgumentList(()))
    assert parse_instruction("add %r1, %r2, (5);").operands[2] == Immediate("(5)", 5)


def test_a_location_holds_until_the_next() -> None:
    text = ".loc 1 2 3\na;\n.loc 1 4 5, function_name f+8, inlined_at 1 2 3\nb;\n{ c; }\n"
    _, first, _, second, scope = parse_statements(text)
    assert isinstance(first, Instruction)
    assert first.location == SourceLocation(1, 2, 3)
    assert isinstance(second, Instruction)
    inlined = SourceLocation(1, 4, 5, "f", 8, SourceLocation(1, 2, 3))
    assert second.location == inlined
    assert isinstance(scope, Scope)
    (inner,) = scope.statements
    assert isinstance(inner, Instruction)
    assert inner.location == inlined


def test_tables_and_prototypes_take_their_label() -> None:
    tables = parse_statements(
        "t: .branchtargets A, B; p : .callprototype (.param .b32 _) _ (.reg .b64 _); A: B:"
    )
    assert tables[0] == BranchTargets("t", ("A", "B"))
    assert isinstance(tables[1], CallPrototype)
    assert [v.space for v in (*tables[1].returns, *tables[1].parameters)] == ["param", "reg"]
    assert tables[2:] == (Label("A"), Label("B"))


def test_a_module_gives_its_parts() -> None:
    module = parse(KITCHEN_SINK)
    assert (module.version, module.target, module.address_size) == ("8.8", ("sm_100a",), 64)
    assert module.files == {1: "/src/a.py", 2: "b.py"}
    assert [kernel.name for kernel in module.kernels] == ["kernel$1"]
    assert [function.name for function in module.functions] == ["vprintf", "lonely", "twice"]
    kernel = module.find_kernel("kernel$1")
    assert kernel.find_directive("reqntid") == (192, 1, 1)
    assert kernel.find_directive("explicitcluster") == ()
    assert kernel.find_directive("maxnreg") is None
    assert kernel.parameters[0].pointer == Pointer("global", 16)
    assert kernel.parameters[1].size_bytes == 128
    assert kernel.parameters[2].pointer == Pointer()
    with pytest.raises(KeyError, match=r"kernel\$1"):
        module.find_kernel("other")


def test_variables_know_size_and_alignment() -> None:
    sizes = {v.name: (v.size_bytes, v.alignment_bytes) for v in parse(KITCHEN_SINK).globals}
    assert sizes == {
        "counter": (4, 4),
        "quad": (32, 16),
        "table": (4, 8),
        "links": (24, 8),
        "bytes": (2, 1),
        "grid2": (16, 4),
        "message": (3, 1),
        "dynamic": (0, 1024),
        "barriers": (32, 8),
        "other": (8, 8),
    }


def test_initialisers_keep_symbols_and_masks() -> None:
    values = {v.name: v.initializer for v in parse(KITCHEN_SINK).globals}
    assert values["links"] == InitializerList(
        (SymbolOffset("counter"), SymbolOffset("table", 8, True), SymbolOffset("twice"))
    )
    masked = SymbolOffset("counter", 0, False, 0xFF00)
    assert isinstance(values["bytes"], InitializerList)
    assert values["bytes"].items[1] == masked


def test_a_kernel_may_lack_parameters_and_body() -> None:
    module = parse(HEADER + ".extern .entry a;\n.entry b { }\n.entry c() .maxntid 32 { ret; }")
    assert [kernel.body is None for kernel in module.kernels] == [True, False, False]
    assert module.kernels[1] == Kernel("b", body=Scope(()), has_parameter_list=False)


def test_one_declaration_may_hold_many_names() -> None:
    (declaration,) = parse_statements(".reg .b32 %r<100>, a, b;")
    assert isinstance(declaration, Declaration)
    assert [(d.name, d.count) for d in declaration.declarators] == [
        ("%r", 100),
        ("a", None),
        ("b", None),
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s32 %r1, %r2", "found '}', expected `,` or `;`"),
        ("add.s32 %r1, ;", "found ';', expected an operand"),
        ("@ add;", "expected an instruction"),
        ("@5 add;", "found '5', expected a predicate register"),
        ("add [%r1;", r"found ';', expected `\+`, `,` or `\]`"),
        ("add {%r1;", "expected `,` or `}`"),
        ("add 99999999999999999999;", "expected a number of at most 64 bits"),
        ("add a::b;", "expected an operand"),
        ("add 1|2|%r1.5;", "expected a constant"),
        (".unknown 1;", "found '.unknown', expected a declaration"),
        (".reg %r1;", "expected a type"),
        (".reg .b32 .b64 %r1;", "expected an alignment, a type or a name"),
        (".local .align 3 .b8 x;", "expected an alignment that is a power of two"),
        (".local .b8 x[-1];", "a dimension of zero or more"),
        ("t: .branchtargets ;", "expected a label"),
        (".loc 1 2", "expected a column"),
        (".loc 1 2 3, what 4", "expected `function_name` or `inlined_at`"),
        (".pragma;", "expected a string"),
        ("5;", "expected an instruction, a label, a directive or `}`"),
    ],
)
def test_an_error_says_what_was_expected(body: str, message: str) -> None:
    with pytest.raises(PtxError, match=rf"^line \d+, column \d+: .*{message}"):
        parse(make_kernel(body, ""))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found the end of the text, expected `.version`"),
        (".target sm_90", "expected `.version`"),
        (".version 8.0", "expected `.target`"),
        (".version 8.0 .target sm_90 .address_size 16", "found '16', expected 32 or 64"),
        (HEADER + ".thing x;", "found '.thing'"),
        (HEADER + '.visible .file 1 "a"', "found '.file'"),
        (HEADER + ".entry k() .unknown 1 {}", "expected a directive of a kernel"),
        (HEADER + ".entry k(.param .b32) {}", "expected a parameter name"),
        (HEADER + ".entry k(.local .b32 x) {}", "`.param`, `.reg`"),
        (HEADER + ".section .debug_str { ;", "found ';', expected `}`"),
        (HEADER + "add.s32 %r1;", "expected a declaration"),
    ],
)
def test_a_bad_module_is_refused(text: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        parse(text)


def test_an_initialiser_may_be_the_warp_size() -> None:
    module = parse(HEADER + ".const .u32 width = WARP_SZ;")
    assert module.globals[0].initializer == Immediate("WARP_SZ", 32)
