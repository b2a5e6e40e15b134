"""printf: C conversions, one line per lane, in lane order."""

import numpy as np

from halfbyte.virtual.device import LaunchOptions
from tests.virtual.run_ptx import launch

HEAD = """
.extern .func (.param .b32 result) vprintf (.param .b64 format, .param .b64 arguments);
.global .align 1 .b8 text[64] = {%s};
.global .align 1 .b8 word[4] = {111, 110, 101, 0};
"""
BODY = """
.local .align 8 .b8 block[64];
.reg .b32 %r<8>; .reg .b64 %d<16>; .reg .pred %p<2>; .reg .f64 %f<2>;
ld.param.u64 %d0, [p0]; mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 3; @!%p0 bra END;
mov.u64 %d1, block; cvta.local.u64 %d2, %d1; mov.u64 %d3, text; cvta.global.u64 %d4, %d3;
{
CALL
}
{
.param .b64 param0; st.param.b64 [param0], %d4;
.param .b64 param1; st.param.b64 [param1], %d2;
.param .b32 retval0;
call.uni (retval0), vprintf, (param0, param1);
}
END:
"""


def run(text, stores):
    codes = ", ".join(map(str, text.encode() + b"\0"))
    printed = []
    launch(
        BODY.replace("CALL", stores),
        [np.zeros(1, np.uint32)],
        head=HEAD % codes,
        options=LaunchOptions(print_text=printed.append),
    )
    return "".join(printed)


def test_each_lane_prints_its_own_line_in_order():
    stores = "neg.s32 %r1, %r0; st.local.u32 [%d1], %r1; st.local.u32 [%d1+4], %r0;"
    assert run("lane %d of %u\n", stores) == "lane 0 of 0\nlane -1 of 1\nlane -2 of 2\n"


def test_conversions_take_their_flags_width_and_size():
    stores = """
    mov.u32 %r1, 255; st.local.u32 [%d1], %r1; mov.u64 %d5, 0x1ffffffff; st.local.u64 [%d1+8], %d5;
    mov.f64 %f0, 0d400921FB54442D18; st.local.f64 [%d1+16], %f0; mov.u32 %r2, 65;
    st.local.u32 [%d1+24], %r2; mov.u64 %d6, word; cvta.global.u64 %d7, %d6;
    st.local.u64 [%d1+32], %d7;
    """
    assert run("%#06x %lld|%8.3f|%c %s%%\n", stores) == "0x00ff 8589934591|   3.142|A one%\n" * 3
