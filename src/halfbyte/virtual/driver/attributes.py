"""CUDA's numbers for device and kernel attributes, answered from the virtual GPU's record.

The numbers are those of the public enumeration cudaDeviceAttr / CUdevice_attribute (CUDA 13).
"""

from dataclasses import dataclass

from halfbyte.arch.gpus import Gpu

MAX_SHARED_BYTES_OPTIN = 97
MULTIPROCESSORS = 16
RESERVED_SHARED_BYTES = 111
DRIVER_VERSION = 13020  # what programs that ask for 13.x features expect

# cudaFuncAttribute / CUfunction_attribute
KERNEL_MAX_THREADS = 0
KERNEL_STATIC_SHARED_BYTES = 1
KERNEL_MAX_DYNAMIC_SHARED_BYTES = 8


@dataclass(frozen=True)
class DeviceFacts:
    """What the CUDA runtime tells about a GPU, from its `halfbyte.arch.gpus.Gpu` record."""

    name: str
    target: str
    major: int
    minor: int
    multiprocessors: int
    shared_bytes_per_block: int
    shared_bytes_per_multiprocessor: int
    reserved_shared_bytes: int
    memory_bytes: int
    l2_bytes: int
    clock_khz: int
    warps_per_multiprocessor: int
    blocks_per_multiprocessor: int


def read_device_facts(gpu: Gpu) -> DeviceFacts:
    """Return the facts of a `Gpu` record."""
    major, minor = gpu.capability
    return DeviceFacts(
        name=gpu.device_name,
        target=gpu.target,
        major=major,
        minor=minor,
        multiprocessors=gpu.num_sms,
        shared_bytes_per_block=gpu.shared_bytes_per_cta,
        shared_bytes_per_multiprocessor=gpu.shared_bytes_per_sm,
        reserved_shared_bytes=gpu.reserved_shared_bytes,
        memory_bytes=gpu.memory_bytes,
        l2_bytes=gpu.l2_bytes,
        clock_khz=int(gpu.clock / 1000),
        warps_per_multiprocessor=gpu.max_warps_per_sm,
        blocks_per_multiprocessor=gpu.max_ctas_per_sm,
    )


def make_device_attributes(facts: DeviceFacts) -> dict[int, int]:
    """Return the value of each device attribute by its number; what is missing counts as 1."""
    return {
        1: 1024,  # threads per block
        2: 1024,  # block x, y, z
        3: 1024,
        4: 64,
        5: 2**31 - 1,  # grid x, y, z
        6: 65535,
        7: 65535,
        8: 48 * 1024,  # shared memory per block without opting in
        9: 64 * 1024,  # constant memory
        10: 32,  # warp size
        12: 65536,  # registers per block
        13: facts.clock_khz,
        MULTIPROCESSORS: facts.multiprocessors,
        17: 0,  # kernel timeout
        18: 0,  # integrated
        20: 0,  # compute mode
        32: 0,  # ECC
        33: 0,  # PCI bus, device
        34: 0,
        35: 0,  # TCC driver
        38: facts.l2_bytes,
        39: facts.warps_per_multiprocessor * 32,
        75: facts.major,
        76: facts.minor,
        81: facts.shared_bytes_per_multiprocessor,
        82: 65536,  # registers per multiprocessor
        84: 0,  # multi-GPU board
        MAX_SHARED_BYTES_OPTIN: facts.shared_bytes_per_block,
        106: facts.blocks_per_multiprocessor,
        RESERVED_SHARED_BYTES: facts.reserved_shared_bytes,
        132: 0,  # multicast objects over NVLink
    }


def count_resident_blocks(facts: DeviceFacts, threads: int, shared_bytes: int) -> int:
    """Return how many blocks fit on one multiprocessor; registers are not counted."""
    by_threads = facts.warps_per_multiprocessor // max(1, -(-threads // 32))
    by_shared = facts.shared_bytes_per_multiprocessor // (
        shared_bytes + facts.reserved_shared_bytes
    )
    return max(0, min(by_threads, by_shared, facts.blocks_per_multiprocessor))


def count_resident_clusters(facts: DeviceFacts, blocks_per_cluster: int, per_sm: int) -> int:
    """Return how many clusters are resident when each multiprocessor holds `per_sm` blocks.

    A cluster lives in one group of multiprocessors (GPC); without its true size the whole device
    is taken as one group, which a real device undercuts for large clusters.
    """
    return facts.multiprocessors * per_sm // blocks_per_cluster
