"""multimem on a group of one device: plain loads, stores and reductions."""

import numpy as np

from halfbyte.virtual.memory import make_aligned_bytes
from tests.virtual.run_ptx import launch


def test_one_device_is_its_whole_multicast_group():
    memory = make_aligned_bytes(32 * 16).view(np.float32)
    out = make_aligned_bytes(32 * 16).view(np.float32)
    memory[:] = np.arange(128)
    launch(
        """
        .reg .b32 %r<16>; .reg .b64 %d<8>;
        mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
        mad.wide.u32 %d2, %r0, 16, %d0; mad.wide.u32 %d3, %r0, 16, %d1;
        mov.f32 %r5, 0f3F800000; mov.u32 %r6, 0;
        multimem.red.relaxed.sys.global.add.v4.f32 [%d2], {%r5, %r5, %r6, %r6};
        multimem.ld_reduce.weak.global.add.v4.f32 {%r1, %r2, %r3, %r4}, [%d2];
        multimem.st.weak.global.v4.f32 [%d3], {%r1, %r2, %r3, %r4};
        """,
        [memory, out],
    )
    expected = np.arange(128) + np.tile([1, 1, 0, 0], 32)
    assert (memory == expected).all()
    assert (out == expected).all()
