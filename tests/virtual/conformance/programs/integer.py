"""Integer arithmetic, shifts, bit fields, carries, comparisons: edge values, all pairs."""

from ..elementwise import Column, columns, cross, elementwise
from ..program import ConformanceProgram
from ..values import integer_edges, make_random, pairs


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the integer programs."""
    return (
        _arithmetic(16),
        _arithmetic(32),
        _arithmetic(64),
        _products(),
        _division(),
        _shifts(),
        _bit_fields(),
        _permutes(),
        _logic(),
        _carries(),
        _packed(),
        _comparisons(),
        _selections(),
    )


def _table(bits: int, count: int, salt: int) -> dict:
    return pairs(integer_edges(bits), count, make_random(bits, salt))


def _arithmetic(bits: int) -> ConformanceProgram:
    operations = [f"{name}.{sign}{bits}" for name in ("add", "sub") for sign in "us"]
    operations += [f"{name}.{sign}{bits}" for name in ("min", "max") for sign in "us"]
    operations += [f"mul.lo.{sign}{bits}" for sign in "us"]
    operations += [f"mul.hi.{sign}{bits}" for sign in "us"]
    if bits == 32:
        operations += ["add.sat.s32", "sub.sat.s32", "min.relu.s32", "max.relu.s32"]
    table = cross(operations, "%a, %b", bits)
    table += cross([f"abs.s{bits}", f"neg.s{bits}"], "%a", bits)
    triples = [f"mad.lo.{sign}{bits}" for sign in "us"] + [f"mad.hi.{sign}{bits}" for sign in "us"]
    triples += [f"sad.{sign}{bits}" for sign in "us"]
    if bits == 32:
        triples.append("mad.hi.sat.s32")
    table += cross(triples, "%a, %b, %c", bits)
    return elementwise(f"integer_arithmetic_{bits}", _table(bits, 640, 1), table)


def _products() -> ConformanceProgram:
    table = cross(["mul.wide.u32", "mul.wide.s32"], "%a, %b", 64)
    table += columns(64, "mad.wide.u32 %a, %b, %d2", "mad.wide.s32 %a, %b, %d2")
    table = [Column(c.width, "mov.b64 %d2, {%c, %a};\n" + c.text, c.name) for c in table]
    table += cross(["mul24.lo.u32", "mul24.lo.s32", "mul24.hi.u32", "mul24.hi.s32"], "%a, %b", 32)
    table += cross(["mad24.lo.u32", "mad24.lo.s32", "mad24.hi.sat.s32"], "%a, %b, %c", 32)
    halves = "mov.b32 {%h1, %h2}, %a;\nmov.b32 {%h3, %h4}, %b;\n"
    for sign in "us":
        table.append(
            Column(32, halves + f"mul.wide.{sign}16 {{d}}, %h1, %h3;", f"mul.wide.{sign}16")
        )
        text = halves + f"mad.wide.{sign}16 {{d}}, %h2, %h4, %c;"
        table.append(Column(32, text, f"mad.wide.{sign}16"))
    return elementwise("integer_products", _table(32, 640, 2), table)


def _division() -> ConformanceProgram:
    table = cross([f"{op}.{sign}32" for op in ("div", "rem") for sign in "us"], "%a, %b", 32)
    widen = {
        16: "cvt.u16.u32 %h1, %a;\ncvt.u16.u32 %h2, %b;\n",
        64: "mov.b64 %d2, {%a, %c};\nmov.b64 %d3, {%b, %c};\nshr.s64 %d3, %d3, 17;\n",
    }
    for bits in (16, 64):
        first, second = ("%h1", "%h2") if bits == 16 else ("%d2", "%d3")
        for operation in ("div", "rem"):
            for sign in "us":
                opcode = f"{operation}.{sign}{bits}"
                text = widen[bits] + f"{opcode} {{d}}, {first}, {second};"
                table.append(Column(bits, text, opcode))
    return elementwise("integer_division_by_zero_too", _table(32, 640, 3), table)


def _shifts() -> ConformanceProgram:
    table = cross(["shl.b32", "shr.b32", "shr.u32", "shr.s32"], "%a, %b", 32)
    table += cross(
        [f"shf.{side}.{mode}.b32" for side in "lr" for mode in ("wrap", "clamp")],
        "%a, %c, %b",
        32,
    )
    narrow = "cvt.u16.u32 %h1, %a;\n"
    wide = "mov.b64 %d2, {%c, %a};\n"
    for opcode in ("shl.b16", "shr.u16", "shr.s16"):
        table.append(Column(16, f"{narrow}{opcode} {{d}}, %h1, %b;", opcode))
    for opcode in ("shl.b64", "shr.u64", "shr.s64"):
        table.append(Column(64, f"{wide}{opcode} {{d}}, %d2, %b;", opcode))
    table += cross([f"bmsk.{mode}.b32" for mode in ("wrap", "clamp")], "%a, %b", 32)
    table += cross(
        [f"szext.{mode}.{sign}32" for mode in ("wrap", "clamp") for sign in "us"], "%a, %b", 32
    )
    return elementwise("integer_shifts_beyond_width", _table(32, 640, 4), table)


def _bit_fields() -> ConformanceProgram:
    wide = "mov.b64 %d2, {%a, %b};\nmov.b64 %d3, {%c, %b};\nshr.u32 %r1, %a, 3;\n"
    table = columns(
        32,
        "bfe.u32 %a, %b, %c",
        "bfe.s32 %a, %b, %c",
        "bfi.b32 %a, %b, %c, %b",
        "brev.b32 %a",
        "popc.b32 %a",
        "clz.b32 %a",
        "bfind.u32 %a",
        "bfind.s32 %a",
        "bfind.shiftamt.u32 %a",
        "bfind.shiftamt.s32 %a",
    )
    for opcode in ("bfe.u64", "bfe.s64"):
        table.append(Column(64, f"{wide}{opcode} {{d}}, %d2, %b, %c;", opcode))
    table.append(Column(64, wide + "bfi.b64 {d}, %d2, %d3, %b, %c;", "bfi.b64"))
    table.append(Column(64, wide + "brev.b64 {d}, %d2;", "brev.b64"))
    for opcode in ("popc.b64", "clz.b64", "bfind.u64", "bfind.s64", "bfind.shiftamt.u64"):
        table.append(Column(32, f"{wide}{opcode} {{d}}, %d2;", opcode))
    fns = "and.b32 %r1, %b, 31;\nshr.s32 %r2, %c, 27;\nfns.b32 {d}, %a, %r1, %r2;"
    table.append(Column(32, fns, "fns.b32"))
    # Positions and lengths beyond the width, small ones in between.
    table_32 = _table(32, 640, 5)
    table_32["c"] = table_32["c"] % 300
    return elementwise("integer_bit_fields", table_32, table)


def _permutes() -> ConformanceProgram:
    modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    table = columns(32, "prmt.b32 %a, %b, %c", "prmt.b32 %a, %b, 0x8f3a", "prmt.b32 %c, %a, 0x0123")
    table += cross([f"prmt.b32.{mode}" for mode in modes], "%a, %b, %c", 32)
    return elementwise("integer_permute_modes", _table(32, 1024, 6), table)


def _logic() -> ConformanceProgram:
    table = cross([f"{op}.b32" for op in ("and", "or", "xor")], "%a, %b", 32)
    table += cross(["not.b32", "cnot.b32"], "%a", 32)
    for lut in (0x00, 0x01, 0x17, 0x2A, 0x3C, 0x69, 0x80, 0x96, 0xC0, 0xCA, 0xE8, 0xFE, 0xFF):
        table.append(Column(32, f"lop3.b32 {{d}}, %a, %b, %c, {lut};", f"lop3.b32 {lut:#04x}"))
    for operation in ("or", "and"):
        # The predicate source is a constant of the first bit of c.
        text = "setp.ne.u32 %p1, %c, 0;\nlop3.{0}.b32 %r1|%p0, %a, %b, %c, 0x96, %p1;"
        table.append(Column(1, text.format(operation), f"lop3.{operation}.b32 pred"))
    wide = "mov.b64 %d2, {%a, %b};\nmov.b64 %d3, {%c, %a};\n"
    for opcode in ("and.b64", "or.b64", "xor.b64"):
        table.append(Column(64, f"{wide}{opcode} {{d}}, %d2, %d3;", opcode))
    for opcode in ("not.b64", "cnot.b64"):
        table.append(Column(64, f"{wide}{opcode} {{d}}, %d2;", opcode))
    narrow = "cvt.u16.u32 %h1, %a;\ncvt.u16.u32 %h2, %b;\n"
    for opcode in ("and.b16", "or.b16", "xor.b16"):
        table.append(Column(16, f"{narrow}{opcode} {{d}}, %h1, %h2;", opcode))
    for opcode in ("not.b16", "cnot.b16"):
        table.append(Column(16, f"{narrow}{opcode} {{d}}, %h1;", opcode))
    for opcode in ("and.pred", "or.pred", "xor.pred"):
        text = f"setp.lt.s32 %p1, %a, %b;\nsetp.lo.u32 %p2, %b, %c;\n{opcode} {{d}}, %p1, %p2;"
        table.append(Column(1, text, opcode))
    table.append(Column(1, "setp.lt.s32 %p1, %a, %b;\nnot.pred {d}, %p1;", "not.pred"))
    return elementwise("integer_logic", _table(32, 640, 7), table)


def _carries() -> ConformanceProgram:
    def chain(name: str, width: int, first: str, second: str) -> Column:
        return Column(width, f"{first}\n{second}", name)

    table = [
        chain("add.cc/addc.u32", 32, "add.cc.u32 %r1, %a, %b;", "addc.u32 {d}, %c, %a;"),
        chain("sub.cc/subc.u32", 32, "sub.cc.u32 %r1, %a, %b;", "subc.u32 {d}, %c, %a;"),
        chain("add.cc.s32/addc.s32", 32, "add.cc.s32 %r1, %a, %b;", "addc.s32 {d}, %c, %a;"),
        chain("mad.lo.cc/addc", 32, "mad.lo.cc.u32 %r1, %a, %b, %c;", "addc.u32 {d}, %a, 0;"),
        chain("mad.hi.cc/addc", 32, "mad.hi.cc.u32 %r1, %a, %b, %c;", "addc.u32 {d}, %b, 0;"),
        chain("add.cc/madc.hi", 32, "add.cc.u32 %r1, %a, %b;", "madc.hi.u32 {d}, %a, %b, %c;"),
        chain("add.cc/madc.lo", 32, "add.cc.u32 %r1, %a, %b;", "madc.lo.u32 {d}, %a, %b, %c;"),
        chain(
            "add.cc/addc.cc/addc",
            32,
            "add.cc.u32 %r1, %a, %b;\naddc.cc.u32 %r2, %c, %a;",
            "addc.u32 {d}, 0, 0;",
        ),
        chain(
            "sub.cc/subc.cc/subc",
            32,
            "sub.cc.u32 %r1, %a, %b;\nsubc.cc.u32 %r2, %c, %a;",
            "subc.u32 {d}, 0, 0;",
        ),
        chain(
            "madc.lo.cc/madc.hi.cc/addc",
            32,
            "add.cc.u32 %r1, %a, %c;\nmadc.lo.cc.u32 %r2, %a, %b, %c;\n"
            "madc.hi.cc.u32 %r3, %a, %b, %r2;",
            "addc.u32 {d}, %r3, 0;",
        ),
    ]
    wide = "mov.b64 %d2, {%a, %b};\nmov.b64 %d3, {%c, %a};\nmov.b64 %d4, {%b, %c};\n"
    table.append(
        chain("add.cc.u64", 64, wide + "add.cc.u64 %d5, %d2, %d3;", "addc.u64 {d}, %d4, %d2;")
    )
    table.append(
        chain("sub.cc.u64", 64, wide + "sub.cc.u64 %d5, %d2, %d3;", "subc.u64 {d}, %d4, %d2;")
    )
    return elementwise("integer_carry_chains", _table(32, 640, 8), table)


def _packed() -> ConformanceProgram:
    table = cross([f"dp4a.{a}32.{b}32" for a in "us" for b in "us"], "%a, %b, %c", 32)
    table += cross(
        [f"dp2a.{half}.{a}32.{b}32" for half in ("lo", "hi") for a in "us" for b in "us"],
        "%a, %b, %c",
        32,
    )
    table += cross(
        [f"{op}.{sign}16x2" for op in ("add", "min", "max") for sign in "us"], "%a, %b", 32
    )
    table += cross(["min.relu.s16x2", "max.relu.s16x2"], "%a, %b", 32)
    return elementwise("integer_packed", _table(32, 640, 9), table)


def _comparisons() -> ConformanceProgram:
    table = [
        column
        for kind, names in (
            ("b32", "eq ne"),
            ("s32", "eq ne lt le gt ge"),
            ("u32", "eq ne lt le gt ge lo ls hi hs"),
        )
        for column in cross([f"setp.{name}.{kind}" for name in names.split()], "%a, %b", 1)
    ]
    table += cross(["set.lt.u32.s32", "set.hs.u32.u32", "set.ge.f32.s32"], "%a, %b", 32)
    booleans = "setp.ne.u32 %p1, %c, 0;\n"
    for operation in ("and", "or", "xor"):
        for side in ("%p1", "!%p1"):
            name = f"setp.lt.{operation}.s32 {side}"
            text = f"{booleans}setp.lt.{operation}.s32 %p2|%p3, %a, %b, {side};\n"
            text += "selp.u32 %r1, 1, 0, %p2;\nselp.u32 %r2, 2, 0, %p3;\nor.b32 {d}, %r1, %r2;"
            table.append(Column(32, text, name))
            text = f"{booleans}set.gt.{operation}.u32.s32 {{d}}, %a, %b, {side};"
            table.append(Column(32, text, f"set.gt.{operation}.u32.s32 {side}"))
    narrow = "cvt.u16.u32 %h1, %a;\ncvt.u16.u32 %h2, %b;\n"
    wide = "mov.b64 %d2, {%a, %b};\nmov.b64 %d3, {%c, %a};\n"
    for opcode in ("setp.lt.s16", "setp.lo.u16", "setp.ge.s16", "setp.eq.b16"):
        table.append(Column(1, f"{narrow}{opcode} {{d}}, %h1, %h2;", opcode))
    for opcode in ("setp.lt.s64", "setp.lo.u64", "setp.ge.s64", "setp.eq.b64"):
        table.append(Column(1, f"{wide}{opcode} {{d}}, %d2, %d3;", opcode))
    return elementwise("integer_comparisons", _table(32, 640, 10), table)


def _selections() -> ConformanceProgram:
    predicate = "setp.lt.s32 %p1, %a, %c;\n"
    wide = "mov.b64 %d2, {%a, %b};\nmov.b64 %d3, {%c, %a};\n"
    narrow = "cvt.u16.u32 %h1, %a;\ncvt.u16.u32 %h2, %b;\n"
    table = [
        Column(32, predicate + "selp.b32 {d}, %a, %b, %p1;", "selp.b32"),
        Column(32, predicate + "selp.f32 {d}, %a, %b, %p1;", "selp.f32"),
        Column(64, predicate + wide + "selp.b64 {d}, %d2, %d3, %p1;", "selp.b64"),
        Column(16, predicate + narrow + "selp.b16 {d}, %h1, %h2, %p1;", "selp.b16"),
        Column(32, "slct.s32.s32 {d}, %a, %b, %c;", "slct.s32.s32"),
        Column(32, "slct.u32.f32 {d}, %a, %b, %c;", "slct.u32.f32"),
        Column(32, "slct.ftz.f32.f32 {d}, %a, %b, %c;", "slct.ftz.f32.f32"),
        Column(64, wide + "slct.u64.s32 {d}, %d2, %d3, %c;", "slct.u64.s32"),
        Column(32, predicate + "mov.u32 %r0, %c;\n@%p1 mov.u32 %r0, %a;", "@p mov"),
        Column(32, predicate + "mov.u32 %r0, %c;\n@!%p1 add.u32 %r0, %r0, %a;", "@!p add"),
    ]
    return elementwise("integer_selections", _table(32, 640, 11), table)
