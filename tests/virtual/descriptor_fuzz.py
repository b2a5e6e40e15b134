"""A program that launches kernels on tensor maps and descriptors with wrong bits.

    python -m tests.virtual.descriptor_fuzz SEED LAUNCHES

A launch may end well or in an error of halfbyte; anything else ends the program.
"""

import random
import sys

import numpy as np

from halfbyte.errors import HalfbyteError
from halfbyte.virtual.device import Device, DeviceModule, LaunchOptions
from halfbyte.virtual.tensor_map import TensorBox, TensorLayout, encode_tensor_map

NUM_WORDS = 8
HEAD = """
    .reg .b64 %p, %m, %d<4>; .reg .b32 %c<40>; .reg .f32 %f<33>; .reg .pred %q<3>;
    .shared .align 1024 .b8 buf[65536]; .shared .align 8 .b64 bar; .shared .b32 base;
    ld.param.u64 %p, [words]; mov.u64 %m, map; cvta.param.u64 %m, %m;
    mbarrier.init.shared.b64 [bar], 1;
"""
ALLOCATE = """
    setp.ge.u32 %q1, %c39, 32; @%q1 bra JOIN;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [base], 512;
    JOIN: bar.sync 0; setp.ne.u32 %q1, %c39, 0; @%q1 bra END;
"""
ACCUMULATORS = "{" + ", ".join(f"%f{i}" for i in range(32)) + "}"
WGMMA = (
    "wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
    f"{ACCUMULATORS}, %d0, %d1, 1, 1, 1, 0, 1; wgmma.commit_group.sync.aligned; "
    "wgmma.wait_group.sync.aligned 0;"
)


def list_copies(rank: int) -> list[str]:
    """Return the tensor copies of one rank."""
    place = "{" + ", ".join(f"%c{i}" for i in range(rank)) + "}"
    load = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global"
    loaded = ".mbarrier::complete_tx::bytes"
    store = f"bulk.tensor.{rank}d.global.shared::cta"
    copies = [
        f"{load}.tile{loaded} [buf], [%m, {place}], [bar];",
        f"cp.async.{store}.tile.bulk_group [%m, {place}], [buf];",
        f"cp.reduce.async.{store}.add.tile.bulk_group [%m, {place}], [buf];",
    ]
    if rank > 2:
        offsets = "{" + ", ".join(["%h"] * (rank - 2)) + "}"
        copies.append(
            f".reg .b16 %h; cvt.u16.u32 %h, %c5;"
            f"{load}.im2col{loaded} [buf], [%m, {place}], [bar], {offsets};"
        )
    return copies


def list_products() -> list[str]:
    """Return what reads shared memory or tensor memory through descriptors."""
    products = [
        f"tcgen05.mma.cta_group::1.kind::{kind} [%c0], %d0, %d1, %c1, 1;"
        for kind in ("f16", "tf32", "f8f6f4", "i8")
    ]
    products += [
        f"tcgen05.mma.cta_group::1.kind::{kind} [%c0], %d0, %d1, %c1, [%c2], [%c3], 1;"
        for kind in ("mxf8f6f4.block_scale", "mxf4nvf4.block_scale.scale_vec::4X")
    ]
    products += [
        f"tcgen05.cp.cta_group::1.{shape} [%c0], %d0;"
        for shape in ("128x256b", "4x256b", "32x128b.warpx4.b8x16.b6x16_p32")
    ]
    return products


def load(gpu: str, target: str, body: str) -> DeviceModule:
    """Return the module of a kernel that reads registers from `words`, then runs `body`."""
    reads = [f"ld.global.u64 %d{i}, [%p+{8 * i}];" for i in range(4)]
    reads += [f"ld.global.u32 %c{i}, [%p+{32 + 4 * i}];" for i in range(8)]
    text = "\n".join([HEAD, *reads, "mov.u32 %c39, %tid.x; bar.sync 0;", body])
    parameters = ".param .align 64 .b8 map[128], .param .u64 words"
    return Device(gpu).load(
        f".version 9.0\n.target {target}\n.address_size 64\n"
        f".visible .entry test({parameters})\n{{\n{text}\nEND: ret;\n}}\n"
    )


def spoil(number: int, bits: int, source: random.Random) -> int:
    """Return `number` with up to four of its bits turned over."""
    for _ in range(source.choice((0, 0, 1, 1, 2, 4))):
        number ^= 1 << source.randrange(bits)
    return number


def make_map(address: int, rank: int, source: random.Random) -> bytes:
    """Return a tensor map, mostly of `rank`, with some wrong bits, or 128 random bytes."""
    if source.random() < 0.1:
        return source.randbytes(128)
    rank = source.choice((rank, rank, rank, source.randint(1, 5)))
    good = encode_tensor_map(
        address,
        TensorLayout(source.choice(("u8", "f16", "f32")), (128, *(4,) * (rank - 1))),
        TensorBox((16, *(2,) * (rank - 1))),
    )
    number = spoil(int.from_bytes(good[:64], "little"), 512, source)
    return number.to_bytes(64, "little") + bytes(64)


def make_words(source: random.Random) -> np.ndarray:
    """Return what the registers hold: shared descriptors, an instruction descriptor, columns."""
    words = np.zeros(NUM_WORDS, np.uint64)
    for i in range(4):
        start, stride = source.choice((1024, 2048, 8192, 65536)) >> 4, source.choice((1, 8, 64))
        good = start | stride << 16 | 64 << 32 | 1 << 46 | source.choice((0, 0, 2, 4, 6)) << 61
        words[i] = spoil(good, 64, source)
    small = words[4:].view(np.uint32)
    small[:] = [source.choice((0, 128, 511, source.randrange(2**32))) for _ in range(small.size)]
    columns = source.choice((8, 16, 64, 256)) // 8
    formats = source.randrange(3) << 7 | source.randrange(3) << 10
    small[1] = spoil(1 << 4 | formats | columns << 17 | 8 << 24, 32, source)
    return words


def main(seed: int, launches: int) -> None:
    """Launch, and print how many launches ended well and how many in an error."""
    source = random.Random(seed)
    ranks = [rank for rank in range(1, 6) for _ in list_copies(rank)]
    modules = [load("b200", "sm_100a", copy) for rank in range(1, 6) for copy in list_copies(rank)]
    modules += [load("b200", "sm_100a", ALLOCATE + product) for product in list_products()]
    modules.append(load("h200", "sm_90a", WGMMA))
    ranks += [1] * (len(modules) - len(ranks))
    options = LaunchOptions(num_threads=1, max_instructions=100_000)
    ended = {True: 0, False: 0}
    for number in range(launches):
        module = modules[number % len(modules)]
        data = np.zeros(1 << 16, np.uint8)
        address = (int(data.ctypes.data) + 255) // 256 * 256
        module.device.memory.register(int(data.ctypes.data), data.size, "data", keep=data)
        rank = ranks[number % len(modules)]
        arguments = [make_map(address, rank, source), make_words(source)]
        block = (128, 1, 1)
        try:
            module.launch("test", (1, 1, 1), block, arguments=arguments, options=options)
            ended[True] += 1
        except HalfbyteError:
            ended[False] += 1
        finally:
            module.device.memory.unregister(int(data.ctypes.data))
    print(f"{ended[True]} ended well, {ended[False]} in an error")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
