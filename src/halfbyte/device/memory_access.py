"""Loads, stores and asynchronous copies by address, one function per PTX instruction.

Global addresses are Int64 and shared ones Int32, in bytes.
"""

from cutlass import Float32, Int32, Int64, Uint16, Uint32

from halfbyte.device.inline_ptx import emit_memory_ptx

Words4 = tuple[Uint32, Uint32, Uint32, Uint32]


def cp_async_16(shared: Int32, source: Int64, valid_bytes: Int32) -> None:
    """Start a copy of 16 bytes to shared memory: `valid_bytes` of the source, then zeros.

    Both addresses are multiples of 16; with 0 valid bytes the source is not read.
    """
    emit_memory_ptx(
        "cp.async.cg.shared.global [$0], [$1], 16, $2;", (), (shared, source, valid_bytes)
    )


def ld_shared_v4(address: Int32) -> Words4:
    """Return 16 bytes of shared memory."""
    words: Words4 = emit_memory_ptx(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", (Uint32,) * 4, (address,)
    )
    return words


def ld_shared_v4_f32(address: Int32) -> tuple[Float32, Float32, Float32, Float32]:
    """Return four float32 of shared memory."""
    values: tuple[Float32, Float32, Float32, Float32] = emit_memory_ptx(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", (Float32,) * 4, (address,)
    )
    return values


def st_shared_v4(address: Int32, words: Words4) -> None:
    """Store 16 bytes to shared memory."""
    emit_memory_ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", (), (address, *words))


def ld_shared_b32(address: Int32) -> Uint32:
    """Return 4 bytes of shared memory."""
    return emit_memory_ptx("ld.shared.b32 $0, [$1];", (Uint32,), (address,))


def st_shared_b32(address: Int32, word: Uint32) -> None:
    """Store 4 bytes to shared memory."""
    emit_memory_ptx("st.shared.b32 [$0], $1;", (), (address, word))


def ld_shared_f32(address: Int32) -> Float32:
    """Return a float32 of shared memory."""
    return emit_memory_ptx("ld.shared.f32 $0, [$1];", (Float32,), (address,))


def st_shared_f32(address: Int32, value: Float32) -> None:
    """Store a float32 to shared memory."""
    emit_memory_ptx("st.shared.f32 [$0], $1;", (), (address, value))


def st_shared_pair_f32(address: Int32, low: Float32, high: Float32) -> None:
    """Store two float32 to shared memory."""
    emit_memory_ptx("st.shared.v2.f32 [$0], {$1, $2};", (), (address, low, high))


def mapa_shared_cluster(address: Int32, rank: Int32) -> Int32:
    """Return the address of the same place in the shared memory of CTA `rank` of the cluster."""
    return emit_memory_ptx("mapa.shared::cluster.u32 $0, $1, $2;", (Int32,), (address, rank))


def ld_shared_cluster_pair_f32(address: Int32) -> tuple[Float32, Float32]:
    """Return two float32 of the shared memory of any CTA of the cluster."""
    low, high = emit_memory_ptx(
        "ld.shared::cluster.v2.f32 {$0, $1}, [$2];", (Float32, Float32), (address,)
    )
    return low, high


def ld_shared_cluster_f32_vector(address: Int32, width: int) -> tuple[Float32, ...]:
    """Return 2 or 4 float32 of the shared memory of any CTA of the cluster."""
    results = ", ".join(f"${index}" for index in range(width))
    values: tuple[Float32, ...] = emit_memory_ptx(
        f"ld.shared::cluster.v{width}.f32 {{{results}}}, [${width}];",
        (Float32,) * width,
        (address,),
    )
    return values


def ld_shared_f32_vector(address: Int32, width: int) -> tuple[Float32, ...]:
    """Return 2 or 4 float32 of shared memory."""
    results = ", ".join(f"${index}" for index in range(width))
    values: tuple[Float32, ...] = emit_memory_ptx(
        f"ld.shared.v{width}.f32 {{{results}}}, [${width}];", (Float32,) * width, (address,)
    )
    return values


def st_async_f32_vector(address: Int32, values: tuple[Float32, ...], barrier: Int32) -> None:
    """Start a store of 2 or 4 float32 to any CTA of the cluster; its bytes count at `barrier`.

    Both addresses are of the same CTA's shared memory (`mapa_shared_cluster`).
    """
    width = len(values)
    sources = ", ".join(f"${index + 2}" for index in range(width))
    emit_memory_ptx(
        f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v{width}.f32 "
        f"[$0], {{{sources}}}, [$1];",
        (),
        (address, barrier, *values),
    )


def mbarrier_arrive_cluster(barrier: Int32) -> None:
    """Arrive at a barrier of any CTA of the cluster; what came before is visible to who waits."""
    emit_memory_ptx("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];", (), (barrier,))


def mbarrier_wait_cluster(barrier: Int32, phase: Int32) -> None:
    """Wait for a barrier of this CTA at which other CTAs of the cluster arrive.

    Acquires what they released: a wait without a scope acquires from its own CTA only.
    """
    emit_memory_ptx(
        "{ .reg .pred done; wait: "
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1; "
        "@!done bra wait; }",
        (),
        (barrier, phase),
    )


def ld_global_v4(address: Int64) -> Words4:
    """Return 16 bytes of global memory."""
    words: Words4 = emit_memory_ptx(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", (Uint32,) * 4, (address,)
    )
    return words


def ld_global_f32(address: Int64) -> Float32:
    """Return a float32 of global memory."""
    return emit_memory_ptx("ld.global.f32 $0, [$1];", (Float32,), (address,))


def ld_global_b32(address: Int64) -> Uint32:
    """Return 4 bytes of global memory."""
    return emit_memory_ptx("ld.global.b32 $0, [$1];", (Uint32,), (address,))


def ld_global_b16(address: Int64) -> Uint16:
    """Return 2 bytes of global memory."""
    return emit_memory_ptx("ld.global.b16 $0, [$1];", (Uint16,), (address,))


def st_global_b8(address: Int64, byte: Uint32) -> None:
    """Store the lowest byte of a word to global memory."""
    emit_memory_ptx("st.global.b8 [$0], $1;", (), (address, byte))


def st_global_b16(address: Int64, bits: Uint16) -> None:
    """Store 2 bytes to global memory."""
    emit_memory_ptx("st.global.b16 [$0], $1;", (), (address, bits))


def st_global_b32(address: Int64, word: Uint32) -> None:
    """Store 4 bytes to global memory."""
    emit_memory_ptx("st.global.b32 [$0], $1;", (), (address, word))


def st_global_f32(address: Int64, value: Float32) -> None:
    """Store a float32 to global memory."""
    emit_memory_ptx("st.global.f32 [$0], $1;", (), (address, value))


def st_global_pair(address: Int64, low: Uint32, high: Uint32) -> None:
    """Store 8 bytes to global memory."""
    emit_memory_ptx("st.global.v2.b32 [$0], {$1, $2};", (), (address, low, high))


def st_global_v4(address: Int64, words: Words4) -> None:
    """Store 16 bytes to global memory."""
    emit_memory_ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", (), (address, *words))


def cp_async_bulk(shared: Int32, source: Int64, num_bytes: int, barrier: Int32) -> None:
    """Start a copy of `num_bytes` contiguous bytes to shared memory; they count at `barrier`.

    Addresses and size are multiples of 16.
    """
    emit_memory_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[$0], [$1], {num_bytes}, [$2];",
        (),
        (shared, source, barrier),
    )
