"""Names of nested scopes made unique."""

import pytest

from halfbyte.errors import PtxError
from halfbyte.ptx.parser import parse
from halfbyte.ptx.printer import format_instruction
from halfbyte.ptx.scopes import FlatBody, resolve
from halfbyte.ptx.syntax import Instruction
from tests.ptx.texts import HEADER, make_kernel

WAIT = "{ .reg .pred P1; WAIT: try P1, [%r1]; @P1 bra DONE; bra WAIT; DONE: }\n"


def flatten(body: str, registers: str = ".reg .pred %p<9>; .reg .b32 %r<99>;") -> FlatBody:
    return resolve(parse(make_kernel(body, registers)).kernels[0])


def list_texts(body: FlatBody) -> list[str]:
    return [
        format_instruction(item) if isinstance(item, Instruction) else f"{item.name}:"
        for item in body.statements
    ]


def test_repeated_inline_assembly_gets_names_of_its_own() -> None:
    body = flatten(WAIT * 3)
    texts = list_texts(body)
    assert texts[:5] == ["WAIT:", "try P1, [%r1];", "@P1 bra DONE;", "bra WAIT;", "DONE:"]
    assert texts[5:10] == [
        "WAIT$1:",
        "try P1$1, [%r1];",
        "@P1$1 bra DONE$1;",
        "bra WAIT$1;",
        "DONE$1:",
    ]
    assert texts[10] == "WAIT$2:"
    assert body.registers == {"P1": "pred", "%r1": "b32", "P1$1": "pred", "P1$2": "pred"}


def test_an_inner_register_hides_the_outer_only_inside() -> None:
    body = flatten("mov %r1, 1; { .reg .b64 %r1; mov %r1, 2; } mov %r1, 3;")
    assert list_texts(body) == ["mov %r1, 1;", "mov %r1$1, 2;", "mov %r1, 3;"]
    assert body.registers == {"%r1": "b32", "%r1$1": "b64"}


def test_an_inner_range_hides_the_outer_range() -> None:
    body = flatten(
        "mov %r1, 1; { .reg .b64 %r<2>; mov %r1, %r5; } { .reg .f32 %r<3>; mov %r1, 0; }"
    )
    assert list_texts(body) == ["mov %r1, 1;", "mov %r1$1, %r5;", "mov %r1$2, 0;"]
    assert body.registers == {"%r1": "b32", "%r1$1": "b64", "%r5": "b32", "%r1$2": "f32"}


def test_an_outer_name_first_met_later_is_not_mixed_up() -> None:
    body = flatten("{ .reg .pred q; use q; } use q;", ".reg .b32 q;")
    assert list_texts(body) == ["use q$1;", "use q;"]
    assert body.registers == {"q$1": "pred", "q": "b32"}


def test_a_chosen_name_avoids_declared_ones() -> None:
    body = flatten("{ .reg .pred q; use q; } use q, q$1;", ".reg .b32 q, q$1;")
    assert list_texts(body) == ["use q$2;", "use q, q$1;"]


def test_labels_are_seen_from_inner_scopes_and_ahead() -> None:
    body = flatten("{ bra END; { bra END; END: } } END:")
    assert list_texts(body) == ["bra END;", "bra END$1;", "END$1:", "END:"]


def test_names_without_percent_become_registers_everywhere() -> None:
    body = flatten(
        "@!a op b|a, !a, [b+4], {b, _}, [c, {b}];", ".reg .pred a; .reg .b32 b; .reg .b64 c;"
    )
    assert list_texts(body) == ["@!a op b|a, !a, [b+4], {b, _}, [c, {b}];"]
    assert body.registers == {"a": "pred", "b": "b32", "c": "b64"}


def test_vector_registers_become_components() -> None:
    body = flatten(
        "mov v.x, v.g; mov {v.a, v.b}, w; st [%r1], v;",
        ".reg .v4 .f32 v; .reg .v2 .u32 w; .reg .b32 %r<2>;",
    )
    assert list_texts(body) == [
        "mov v.x, v.y;",
        "mov {v.w, v.z}, {w.x, w.y};",
        "st [%r1], {v.x, v.y, v.z, v.w};",
    ]
    assert body.registers["v.w"] == "f32"


def test_selectors_of_scalar_registers_stay() -> None:
    assert list_texts(flatten("vadd %r1, %r2.b0, %r3.h1;")) == ["vadd %r1, %r2.b0, %r3.h1;"]


def test_special_registers_need_no_declaration() -> None:
    body = flatten("mov %r1, %tid.x; mov {%r1, %r2, %r3, %r4}, %ctaid; mov %r1, %clock;")
    assert set(body.registers) == {"%r1", "%r2", "%r3", "%r4"}


def test_variables_and_tables_get_unique_names() -> None:
    scope = "{ .shared .align 8 .b8 s[16]; t: .branchtargets L; mov %r1, s+4; brx.idx %r1, t; L: }"
    body = flatten(scope * 2)
    assert {name: v.size_bytes for name, v in body.variables.items()} == {"s": 16, "s$1": 16}
    assert all(name == variable.name for name, variable in body.variables.items())
    assert body.branch_tables == {"t": ("L",), "t$1": ("L$1",)}
    assert list_texts(body)[3:5] == ["mov %r1, s$1+4;", "brx.idx %r1, t$1;"]


def test_an_extern_variable_keeps_its_name() -> None:
    module = parse(make_kernel("{ .extern .shared .b8 pool[]; mov %r1, pool; }", ".reg .b32 %r1;"))
    assert set(resolve(module.kernels[0], ("pool",)).variables) == {"pool"}


def test_module_symbols_stay_symbols() -> None:
    text = make_kernel("mov %r1, counter;", ".reg .b32 %r<2>;")
    assert list_texts(resolve(parse(text).kernels[0])) == ["mov %r1, counter;"]


def test_reserved_names_are_avoided() -> None:
    module = parse(make_kernel(".reg .b32 counter; mov counter, 1;", ""))
    assert list_texts(resolve(module.kernels[0], ("counter",))) == ["mov counter$1, 1;"]


def test_register_parameters_of_functions_are_registers() -> None:
    text = HEADER + ".func (.reg .b32 r) f(.reg .b32 a, .param .b32 p) { add r, a, 1; ld r, [p]; }"
    body = resolve(parse(text).functions[0])
    assert body.registers == {"r": "b32", "a": "b32"}
    assert [parameter.name for parameter in (*body.returns, *body.parameters)] == ["r", "a", "p"]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("mov %r99, 1;", "%r99"),
        ("mov %r01, 1;", "%r01"),
        ("mov %q, 1;", "%q"),
        ("@P1 bra L; L:", "P1"),
        ("{ .reg .pred P1; } @P1 bra L; L:", "P1"),
        ("mov v.x, 1;", "v"),
        ("{ .reg .v2 .b32 v; mov v.z, 1; }", "v.z"),
        ("{ .reg .v2 .b32 v; add !v, 1; }", "v"),
    ],
)
def test_an_undeclared_register_is_named_with_its_line(body: str, name: str) -> None:
    with pytest.raises(PtxError, match=rf"line 7: register '{name}' is declared in no"):
        flatten(body)


@pytest.mark.parametrize(
    "body",
    [".reg .b32 a; .reg .b64 a;", "L: L:", ".reg .b32 L; L:", ".reg .b32 %r<2>; .reg .b32 %r<3>;"],
)
def test_a_name_declared_twice_is_refused(body: str) -> None:
    with pytest.raises(PtxError, match="declared twice"):
        flatten(body, "")


def test_a_prototype_has_no_body_to_flatten() -> None:
    with pytest.raises(PtxError, match="f has no body"):
        resolve(parse(HEADER + ".func f;").functions[0])
