"""A kernel that fills shared and tensor memory, lets one thread issue work, and reads back.

The layouts here are written from the PTX ISA alone ("Canonical layouts", "Instruction descriptor").
"""

from dataclasses import dataclass, field

import numpy as np

from tests.virtual.run_ptx import launch

LANES, COLUMNS = 128, 512
REGISTERS = [f"%r{10 + i}" for i in range(32)]
FILL = 0x7F5A1234  # what untouched tensor memory holds
SWIZZLE_SPAN = {"none": 16, "32": 32, "64": 64, "128": 128, "128/32": 128}
SWIZZLE_MODE = {"none": 0, "128/32": 1, "128": 2, "64": 4, "32": 6}


@dataclass
class SharedMatrix:
    """Bytes of a matrix in shared memory, and the descriptor fields (all in bytes) that name it."""

    image: np.ndarray
    leading: int
    stride: int
    swizzle: str
    start: int = 0
    extra: int = 0  # further descriptor bits

    def descriptor(self, offset: int) -> int:
        """Return the descriptor of the image placed `offset` bytes into the kernel's buffer."""
        bits = (offset + self.start) >> 4
        bits |= self.leading >> 4 << 16 | self.stride >> 4 << 32 | 1 << 46
        return bits | SWIZZLE_MODE[self.swizzle] << 61 | self.extra


def swizzle_addresses(addresses: np.ndarray, swizzle: str) -> np.ndarray:
    """Return byte addresses after the swizzle of the given mode (CuTe Swizzle<B, 4|5, 3|2>)."""
    if swizzle == "128/32":
        return addresses ^ (addresses >> 7 & 3) << 5
    bits = {"none": 0, "32": 1, "64": 2, "128": 3}[swizzle]
    return addresses ^ (addresses >> 7 & (1 << bits) - 1) << 4


def lay_out_k_major(rows_of_bytes: np.ndarray, swizzle: str) -> SharedMatrix:
    """Return a K-major matrix; `rows_of_bytes` is uint8 [rows][bytes along K]."""
    rows, depth = rows_of_bytes.shape
    row, byte = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    if swizzle == "none":
        leading, stride = rows * 16 + 32, 128
        addresses = row % 8 * 16 + row // 8 * stride + byte // 16 * leading + byte % 16
    else:
        span = SWIZZLE_SPAN[swizzle]
        leading, stride = 16, 8 * span
        addresses = row % 8 * span + row // 8 * stride + byte
    return _place(rows_of_bytes, addresses, leading, stride, swizzle)


def lay_out_mn_major(matrix_bytes: np.ndarray, swizzle: str) -> SharedMatrix:
    """Return an MN-major matrix; `matrix_bytes` is uint8 [k][bytes along M or N]."""
    depth, width = matrix_bytes.shape
    k, byte = np.meshgrid(np.arange(depth), np.arange(width), indexing="ij")
    span = SWIZZLE_SPAN[swizzle]
    if swizzle == "none":
        stride, leading = 128, (width // 16) * 128
        addresses = byte // 16 * stride + k % 8 * 16 + k // 8 * leading + byte % 16
    else:
        lines = 4 if swizzle == "128/32" else 8
        stride = lines * span
        leading = stride * max(1, depth // lines)
        addresses = byte % span + byte // span * leading + k % lines * span + k // lines * stride
    return _place(matrix_bytes, addresses, leading, stride, swizzle)


def _place(
    source: np.ndarray, addresses: np.ndarray, leading: int, stride: int, swizzle: str
) -> SharedMatrix:
    size = (int(addresses.max()) + 1024) // 1024 * 1024
    image = np.full(size, 0xA5, np.uint8)
    image[swizzle_addresses(addresses, swizzle)] = source
    return SharedMatrix(image, leading, stride, swizzle)


@dataclass
class TensorProgram:
    """Work for one CTA or a pair: images per CTA, and what one thread of rank 0 issues."""

    ctas: int = 1
    columns: int = COLUMNS  # of tensor memory that take part
    gpu: str = "b200"
    options: object = None
    lines: list[str] = field(default_factory=list)
    registers: list[str] = field(default_factory=list)
    # What every thread runs once the work is done, before tensor memory is read back; parameter p3
    # is the address of `extra`.
    warp_lines: list[str] = field(default_factory=list)
    extra: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint32))
    shared: list[list[np.ndarray]] = field(default_factory=list)
    used: int = 0
    tensor: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Start from tensor memory that holds FILL."""
        self.tensor = np.full((self.ctas, LANES, COLUMNS), FILL, np.uint32)
        self.shared = [[] for _ in range(self.ctas)]

    def add_shared(self, matrices: list[SharedMatrix]) -> str:
        """Place one matrix per CTA (alike but for their bytes); return its descriptor register."""
        for parts, matrix in zip(self.shared, matrices, strict=True):
            parts.append(matrix.image)
        name = f"%s{len(self.registers)}"
        self.registers.append(name)
        bits = matrices[0].descriptor(self.used)
        self.lines.append(f"add.u64 {name}, %base, {bits:#x};")
        self.used += len(matrices[0].image)
        return name

    def run(self):
        """Return tensor memory [cta][lane][column] after the work, and the launch's report."""
        total = self.used + 1024
        images = np.full((self.ctas, total), 0xA5, np.uint8)
        for image, parts in zip(images, self.shared, strict=True):
            if parts:
                image[: self.used] = np.concatenate(parts)
        result = np.zeros((self.ctas, LANES, COLUMNS), np.uint32)
        report = launch(
            self._body(total),
            [images, self.tensor, result, self.extra],
            gpu=self.gpu,
            block=(128, 1, 1),
            grid=(self.ctas, 1, 1),
            cluster=(self.ctas, 1, 1),
            dynamic_shared=total,
            head=".extern .shared .align 1024 .b8 buffer[];",
            options=self.options,
        )
        return result, report

    def _body(self, total: int) -> str:
        group = f"cta_group::{self.ctas}"
        commit = f"tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster"
        commit += ".multicast::cluster.b64 [%bar], 3;" if self.ctas == 2 else ".b64 [%bar];"
        sync = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
        return "\n".join(
            [
                ".reg .b32 %r<64>, %thread, %rank, %warp, %buf, %bar, %lane;",
                ".reg .b64 %a<8>, %base;",
                ".reg .pred %p<8>, %yes, %no; .reg .b16 %h<4>;",
                *(f".reg .b64 {name};" for name in self.registers),
                "mov.u32 %thread, %tid.x; mov.u32 %rank, %cluster_ctarank;",
                "mov.u32 %buf, buffer;",
                "setp.eq.u32 %yes, %thread, %thread; setp.ne.u32 %no, %thread, %thread;",
                f"add.u32 %bar, %buf, {total - 64}; shr.u32 %warp, %thread, 5;",
                "and.b32 %r0, %buf, 0x3FFFF; shr.u32 %r0, %r0, 4; cvt.u64.u32 %base, %r0;",
                "setp.eq.u32 %p0, %thread, 0; @%p0 mbarrier.init.shared::cta.b64 [%bar], 1;",
                "setp.eq.u32 %p1, %warp, 0; @!%p1 bra filled;",
                f"add.u32 %r1, %buf, {total - 32};",
                f"tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%r1], 512;",
                "filled:",
                *self._fill_shared(total),
                f"bar.sync 0; {sync}",
                *self._fill_tensor(),
                f"bar.sync 0; {sync}",
                "setp.ne.u32 %p2, %thread, 0; setp.ne.u32 %p3, %rank, 0; or.pred %p2, %p2, %p3;",
                "@%p2 bra issued;",
                *self.lines,
                commit,
                "issued:",
                "again: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%bar], 0; @!%p4 bra again;",
                "bar.sync 0;",
                *self.warp_lines,
                "bar.sync 0;",
                *self._read_tensor(),
                f"bar.sync 0; {sync}",
                "@!%p1 bra done;",
                f"tcgen05.dealloc.{group}.sync.aligned.b32 0, 512;",
                "done:",
            ]
        )

    def _fill_shared(self, total: int) -> list[str]:
        return [
            f"ld.param.u64 %a0, [p0]; mul.lo.u32 %r2, %rank, {total}; shl.b32 %r3, %thread, 4;",
            "add.u32 %r2, %r2, %r3; cvt.u64.u32 %a1, %r2; add.u64 %a0, %a0, %a1;",
            "add.u32 %r4, %buf, %r3;",
            f"fill: setp.ge.u32 %p5, %r3, {total - 1024}; @%p5 bra full;",
            "ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%a0];",
            "st.shared.v4.b32 [%r4], {%r5, %r6, %r7, %r8};",
            "add.u64 %a0, %a0, 2048; add.u32 %r4, %r4, 2048; add.u32 %r3, %r3, 2048; bra fill;",
            "full:",
        ]

    def _row_address(self, parameter: str) -> str:
        return (
            f"ld.param.u64 %a0, [{parameter}]; mad.lo.u32 %r2, %rank, 128, %thread;"
            "mul.lo.u32 %r2, %r2, 2048; cvt.u64.u32 %a1, %r2; add.u64 %a0, %a0, %a1;"
            "shl.b32 %r3, %warp, 21;"
        )

    def _loop(self, name: str, body: list[str]) -> list[str]:
        """Return the body once per 32 columns: %r3 is their address, %a0 the row in memory."""
        return [
            "mov.u32 %r4, 0;",
            f"{name}: " + body[0],
            *body[1:],
            "add.u32 %r3, %r3, 32; add.u64 %a0, %a0, 128; add.u32 %r4, %r4, 32;",
            f"setp.lt.u32 %p5, %r4, {self.columns}; @%p5 bra {name};",
        ]

    def _fill_tensor(self) -> list[str]:
        loads = [
            f"ld.global.v4.u32 {{{', '.join(REGISTERS[i : i + 4])}}}, [%a0+{4 * i}];"
            for i in range(0, 32, 4)
        ]
        vector = ", ".join(REGISTERS)
        store = f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r3], {{{vector}}};"
        return [
            self._row_address("p1"),
            *self._loop("filling", [*loads, store]),
            "tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;",
        ]

    def _read_tensor(self) -> list[str]:
        stores = [
            f"st.global.v4.b32 [%a0+{4 * i}], {{{', '.join(REGISTERS[i : i + 4])}}};"
            for i in range(0, 32, 4)
        ]
        vector = ", ".join(REGISTERS)
        load = f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{vector}}}, [%r3];"
        return [
            "tcgen05.fence::after_thread_sync;",
            self._row_address("p2"),
            *self._loop("reading", [load, *stores]),
            "tcgen05.wait::ld.sync.aligned;",
        ]
