"""Calls of functions with a body are put in place; what stays is what has no body."""

import pytest

from halfbyte.errors import PtxError
from halfbyte.ptx.control_flow import make_control_flow
from halfbyte.ptx.inline_calls import inline_calls
from halfbyte.ptx.parser import parse
from halfbyte.ptx.printer import format_instruction
from halfbyte.ptx.scopes import FlatBody
from halfbyte.ptx.syntax import Instruction
from tests.ptx.texts import HEADER, make_kernel

# As nvcc writes a function that is not inlined: `int f(int a) { return a < 0 ? 0 : a * 3; }`
TRIPLE = """
.func  (.param .b32 func_retval0) triple(
	.param .b32 triple_param_0
)
{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<4>;
	ld.param.u32 	%r1, [triple_param_0];
	setp.lt.s32 	%p1, %r1, 0;
	@%p1 bra 	$L__BB0_2;
	mul.lo.s32 	%r2, %r1, 3;
	st.param.b32 	[func_retval0+0], %r2;
	ret;
$L__BB0_2:
	st.param.b32 	[func_retval0+0], 0;
	ret;
}
"""


def make_call(function: str, argument: str, result: str) -> str:
    return f"""
	{{ // callseq 0, 0
	.param .b32 param0;
	st.param.b32 	[param0+0], {argument};
	.param .b32 retval0;
	call.uni (retval0),
	{function},
	(
	param0
	);
	ld.param.b32 	{result}, [retval0+0];
	}} // callseq 0
"""


def inline(functions: str, body: str) -> FlatBody:
    module = parse(make_kernel(body).replace(HEADER, HEADER + functions))
    return inline_calls(module, module.kernels[0])


def list_texts(body: FlatBody) -> list[str]:
    return [
        format_instruction(item) if isinstance(item, Instruction) else f"{item.name}:"
        for item in body.statements
    ]


def test_a_call_becomes_the_statements_of_the_function() -> None:
    body = inline(TRIPLE, make_call("triple", "%r7", "%r8") + "st.global.b32 [%rd1], %r8;")
    assert list_texts(body) == [
        "mov.b32 param0.0, %r7;",
        "mov.b32 %r1, param0.0;",
        "setp.lt.s32 %p1, %r1, 0;",
        "@%p1 bra $L__BB0_2;",
        "mul.lo.s32 %r2, %r1, 3;",
        "mov.b32 retval0.0, %r2;",
        "bra behind_triple;",
        "$L__BB0_2:",
        "mov.b32 retval0.0, 0;",
        "behind_triple:",
        "mov.b32 %r8, retval0.0;",
        "st.global.b32 [%rd1], %r8;",
    ]
    assert body.variables == {}
    assert body.registers["param0.0"] == "b32"
    make_control_flow(body)


def test_each_call_has_names_of_its_own() -> None:
    calls = make_call("triple", "%r1", "%r2") + make_call("triple", "%r2", "%r3")
    body = inline(TRIPLE, calls)
    texts = list_texts(body)
    labels = [text for text in texts if text.endswith(":")]
    assert len(set(labels)) == len(labels) == 4
    assert texts.count("mul.lo.s32 %r2$1, %r1$1, 3;") == 1
    assert texts.count("mul.lo.s32 %r2$2, %r1$2, 3;") == 1
    written = {name for name in body.registers if name.startswith("%r")}
    assert written == {"%r1", "%r2", "%r3", "%r1$1", "%r2$1", "%r1$2", "%r2$2"}
    make_control_flow(body)


def test_functions_that_call_functions_are_put_in_place_too() -> None:
    outer = f"""
.func (.param .b32 func_retval0) outer(.param .b32 outer_param_0)
{{ .reg .b32 %r<9>;
	ld.param.b32 %r1, [outer_param_0];
	{make_call("triple", "%r1", "%r2")}
	{make_call("triple", "%r2", "%r3")}
	st.param.b32 [func_retval0], %r3;
	ret;
}}"""
    body = inline(TRIPLE + outer, make_call("outer", "%r1", "%r2"))
    opcodes = [item.opcode for item in body.statements if isinstance(item, Instruction)]
    assert opcodes.count("mul.lo.s32") == 2
    assert not {"call.uni", "ret", "ld.param.b32", "st.param.b32"} & set(opcodes)
    make_control_flow(body)


def test_a_guarded_call_is_jumped_over() -> None:
    function = ".func (.reg .b32 r) f(.reg .b32 a) { mov.b32 r, a; @%p1 ret; trap; }".replace(
        "{", "{ .reg .pred %p<2>;"
    )
    body = inline(function, "@!%p3 call (%r1), f, (%r2);")
    assert list_texts(body) == [
        "@%p3 bra behind_f;",
        "mov.b32 a, %r2;",
        "mov.b32 r, a;",
        "@%p1 bra return_f;",
        "trap;",
        "return_f:",
        "mov.b32 %r1, r;",
        "behind_f:",
    ]


@pytest.mark.parametrize(
    ("function", "call", "texts"),
    [
        ("f(.reg .f32 a) { neg.f32 a, a; }", "call f, (0f3F800000);", ["mov.f32 a, 0f3F800000;"]),
        (
            "f(.param .b32 a) { .reg .b32 q; ld.param.b32 q, [a]; }",
            "call f, (%r1);",
            ["mov.b32 a.0, %r1;", "mov.b32 q, a.0;"],
        ),
        (
            "f(.reg .b32 a) { neg.s32 a, a; }",
            ".param .b32 x; st.param.b32 [x], 7; call f, (x);",
            ["mov.b32 x.0, 7;", "mov.b32 a, x.0;"],
        ),
        (
            "(.param .b32 r) f() { st.param.b32 [r], 1; }".replace("f", ".func_f", 0),
            "call (%r1), f;",
            ["mov.b32 r.0, 1;", "behind_f:", "mov.b32 %r1, r.0;"],
        ),
        (
            "(.reg .b32 r) f() { mov.b32 r, 1; }",
            ".param .b32 y; call (y), f; ld.param.b32 %r1, [y];",
            ["mov.b32 r, 1;", "behind_f:", "mov.b32 y.0, r;", "mov.b32 %r1, y.0;"],
        ),
        ("(.reg .b32 r) f() { mov.b32 r, 1; }", "call (_), f, ();", ["mov.b32 r, 1;", "behind_f:"]),
    ],
)
def test_registers_and_variables_meet_parameters_of_either_kind(
    function: str, call: str, texts: list[str]
) -> None:
    assert list_texts(inline(f".func {function}", call))[: len(texts)] == texts


def test_a_struct_of_whole_elements_becomes_registers() -> None:
    function = """
.func (.param .align 8 .b8 r[16]) swap(.param .align 8 .b8 a[16])
{ .reg .b32 %r<4>; .reg .b64 %rd<2>;
	ld.param.v2.b32 {%r1, %r2}, [a];
	ld.param.b64 %rd1, [a+8];
	st.param.b64 [r], %rd1;
	st.param.v2.f32 [r+8], {%r2, 0f00000000};
	ret; }"""
    call = """.param .align 8 .b8 x[16]; .param .align 8 .b8 y[16];
	st.param.b32 [x], %r1; st.param.b32 [x+4], %r2; st.param.b64 [x+8], %rd1;
	call (y), swap, (x);
	ld.param.b64 %rd2, [y]; ld.param.v2.b32 {%r3, _}, [y+8];"""
    body = inline(function, call)
    assert body.variables == {}
    assert list_texts(body) == [
        "mov.b32 x.0, %r1;",
        "mov.b32 x.4, %r2;",
        "mov.b64 x.8, %rd1;",
        "mov.b32 %r1$1, x.0;",
        "mov.b32 %r2$1, x.4;",
        "mov.b64 %rd1$1, x.8;",
        "mov.b64 y.0, %rd1$1;",
        "mov.f32 y.8, %r2$1;",
        "mov.f32 y.12, 0f00000000;",
        "behind_swap:",
        "mov.b64 %rd2, y.0;",
        "mov.b32 %r3, y.8;",
    ]


@pytest.mark.parametrize(
    "accesses",
    [
        "ld.param.b8 %r1, [x];",  # extended on the way
        "ld.param.s16 %r1, [x];",
        "ld.param.b32 %r1, [x+2];",  # across two elements
        "ld.param.b64 %rd1, [x];",  # two elements at once
        "ld.param.b32 %r1, [x+12];",  # beyond the end
        "mov.b64 %rd1, x; ld.param.b32 %r1, [%rd1];",
    ],
)
def test_a_variable_of_mixed_accesses_becomes_local(accesses: str) -> None:
    function = (
        f".func f(.param .align 8 .b8 x[12]) {{ .reg .b32 %r<4>; .reg .b64 %rd<4>; {accesses} }}"
    )
    call = ".param .align 8 .b8 p[12]; st.param.b32 [p], %r1; st.param.b32 [p+4], %r2; call f, (p);"
    body = inline(function, call)
    assert {name: v.space for name, v in body.variables.items()} == {"p": "local"}
    assert body.variables["p"].size_bytes == 12
    texts = list_texts(body)
    assert texts[:2] == ["st.local.b32 [p], %r1;", "st.local.b32 [p+4], %r2;"]
    assert "param" not in "".join(texts)


def test_a_call_without_a_body_keeps_its_arguments_as_registers() -> None:
    extern = ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);"
    body = inline(
        extern,
        """.local .align 8 .b8 depot[8];
	mov.u64 %rd2, depot; cvta.local.u64 %rd1, %rd2;
	{ .param .b64 param0; st.param.b64 [param0], %rd5; .param .b64 param1;
	st.param.b64 [param1], %rd1; .param .b32 retval0;
	call.uni (retval0), vprintf, (param0, param1);
	ld.param.b32 %r1, [retval0]; }""",
    )
    assert list_texts(body)[2:] == [
        "mov.b64 param0.0, %rd5;",
        "mov.b64 param1.0, %rd1;",
        "call.uni (retval0.0), vprintf, (param0.0, param1.0);",
        "mov.b32 %r1, retval0.0;",
    ]
    assert set(body.variables) == {"depot"}


def test_stack_and_static_variables_of_functions() -> None:
    function = """.func f() { .local .b8 stack[4]; .shared .b32 once; .extern .shared .b8 pool[];
	.reg .b32 a; mov.b32 a, stack; mov.b32 a, once; mov.b32 a, pool; }"""
    body = inline(function, "call f; call f;")
    spaces = sorted((name, variable.space) for name, variable in body.variables.items())
    assert spaces == [
        ("once", "shared"),
        ("pool", "shared"),
        ("stack", "local"),
        ("stack$1", "local"),
    ]


def test_branch_tables_move_along() -> None:
    function = (
        ".func f(.reg .b32 a) { t: .branchtargets A, B; brx.idx a, t; A: neg.s32 a, a; B: ret; }"
    )
    body = inline(function, "call f, (1); call f, (2);")
    assert body.branch_tables == {"t": ("A", "B"), "t$1": ("A$1", "B$1")}
    make_control_flow(body)


def test_parameters_of_the_kernel_are_left_alone() -> None:
    text = HEADER + ".entry k(.param .b32 x) { .reg .b32 a; ld.param.b32 a, [x]; ret; }"
    module = parse(text)
    body = inline_calls(module, module.kernels[0])
    assert list_texts(body) == ["ld.param.b32 a, [x];", "ret;"]
    assert body.variables == {}


def test_an_alias_is_the_function_it_names() -> None:
    body = inline(".func f() { trap; } .func g(); .alias g, f;", "call g;")
    assert list_texts(body) == ["trap;", "behind_f:"]


@pytest.mark.parametrize(
    ("functions", "body", "message"),
    [
        (".func f() { call f; }", "call f;", "line .*: recursive calls .*: f -> f: call f;"),
        (
            ".func f(); .func g() { call f; } .func f() { call g; }",
            "call f;",
            "recursive calls cannot be put in place: f -> g -> f",
        ),
        ("", "t: .calltargets k; call %rd1, (%r1), t;", "indirect calls .*: call %rd1"),
        ("", "call nobody;", "'nobody' is no function of the module"),
        (".func f(.reg .b32 a) { ret; }", "call f;", "f has 1 arguments, the call 0"),
        (".func f() { ret; }", "call (%r1), f;", "f has 0 results, the call 1"),
        (".func f(.reg .b32 a) { ret; }", "call f, (nothing);", "is no argument or result"),
        ("", "call;", "indirect calls"),
    ],
)
def test_a_call_that_cannot_be_put_in_place_is_named(
    functions: str, body: str, message: str
) -> None:
    with pytest.raises(PtxError, match=message):
        inline(functions, body)


def test_calls_that_double_at_every_level_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.ptx.inline_calls.MAX_STATEMENTS", 10_000)
    functions = ".func f0() { trap; }" + "".join(
        f".func f{level}() {{ call f{level - 1}; call f{level - 1}; }}" for level in range(1, 40)
    )
    with pytest.raises(PtxError, match="instructions with the functions it calls"):
        inline(functions, "call f39;")


def test_a_chain_of_calls_too_deep_is_refused() -> None:
    functions = ".func f0() { trap; }" + "".join(
        f".func f{level}() {{ call f{level - 1}; }}" for level in range(1, 2000)
    )
    with pytest.raises(PtxError, match="calls nest over 100 deep"):
        inline(functions, "call f1999;")
