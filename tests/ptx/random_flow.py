"""Random control-flow graphs and programs, as PTX text."""

from hypothesis import strategies as st

from halfbyte.ptx.control_flow import ControlFlow, make_control_flow
from halfbyte.ptx.parser import parse
from halfbyte.ptx.scopes import FlatBody, resolve
from tests.ptx.texts import make_kernel


def make_body(text: str) -> FlatBody:
    """Return the flat body of a kernel with some registers declared."""
    return resolve(parse(make_kernel(text)).kernels[0])


def make_flow(text: str) -> ControlFlow:
    """Return the graph of a kernel's body."""
    return make_control_flow(make_body(text))


@st.composite
def draw_body(draw: st.DrawFn, max_blocks: int = 8) -> str:
    """Return a body of labelled blocks that move values about and branch at will."""
    num_blocks = draw(st.integers(1, max_blocks))
    registers = st.sampled_from([f"%r{number}" for number in range(1, 6)])
    label = st.integers(0, num_blocks - 1).map(lambda block: f"L{block}")
    predicate = st.sampled_from(["%p1", "%p2", "!%p1"])
    value = st.sampled_from(["%ctaid.x", "%warpid", "1", "2", "7", "10"])
    move = st.one_of(
        st.tuples(registers, registers, registers).map(lambda r: "add.s32 {}, {}, {};".format(*r)),
        st.tuples(registers, value).map(lambda r: "mov.b32 {}, {};".format(*r)),
        st.tuples(registers, value).map(lambda r: "mov.b32 {}, {};".format(*r)),
        registers.map(lambda r: f"add.s32 {r}, {r}, 1;"),
        st.tuples(st.sampled_from(["%p1", "%p2"]), registers, registers).map(
            lambda r: "setp.lt.s32 {}, {}, {};".format(*r)
        ),
        st.tuples(predicate, registers, registers).map(lambda r: "@{} mov.b32 {}, {};".format(*r)),
    )
    end = st.one_of(
        st.just(""),
        st.tuples(predicate, label).map(lambda r: "@{} bra {};".format(*r)),
        label.map(lambda name: f"bra {name};"),
        st.tuples(predicate, label).map(lambda r: "@{} bra {};".format(*r)),
        st.sampled_from(["@%p2 ret;", "@%p1 exit;"]),
    )
    lines = []
    for block in range(num_blocks):
        lines += [f"L{block}:", *draw(st.lists(move, max_size=4)), draw(end)]
    return "\n".join(lines)
