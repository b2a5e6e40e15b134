"""CUDA's numbers for device and kernel attributes, answered from the virtual GPU's record.

The numbers are those of the public enumeration cudaDeviceAttr / CUdevice_attribute (CUDA 13).
"""

from halfbyte.arch.gpus import Gpu

MAX_SHARED_BYTES_OPTIN = 97
MULTIPROCESSORS = 16
RESERVED_SHARED_BYTES = 111
DRIVER_VERSION = 13020  # what programs that ask for 13.x features expect

# cudaFuncAttribute / CUfunction_attribute
KERNEL_MAX_THREADS = 0
KERNEL_STATIC_SHARED_BYTES = 1
KERNEL_MAX_DYNAMIC_SHARED_BYTES = 8


def make_device_attributes(gpu: Gpu) -> dict[int, int]:
    """Return the value of each device attribute by its number; what is missing counts as 1."""
    return {
        1: gpu.max_threads_per_cta,
        **dict(zip((2, 3, 4), gpu.max_block, strict=True)),  # x, y, z
        **dict(zip((5, 6, 7), gpu.max_grid, strict=True)),
        8: gpu.default_shared_bytes_per_cta,
        9: gpu.constant_bytes,
        10: gpu.warp_size,
        12: gpu.registers_per_sm,  # registers per block
        13: int(gpu.clock / 1000),  # kHz
        MULTIPROCESSORS: gpu.num_sms,
        17: 0,  # kernel timeout
        18: 0,  # integrated
        20: 0,  # compute mode
        32: 0,  # ECC
        33: 0,  # PCI bus, device
        34: 0,
        35: 0,  # TCC driver
        38: gpu.l2_bytes,
        39: gpu.max_warps_per_sm * gpu.warp_size,
        75: gpu.capability[0],
        76: gpu.capability[1],
        81: gpu.shared_bytes_per_sm,
        82: gpu.registers_per_sm,
        84: 0,  # multi-GPU board
        MAX_SHARED_BYTES_OPTIN: gpu.shared_bytes_per_cta,
        106: gpu.max_ctas_per_sm,
        RESERVED_SHARED_BYTES: gpu.reserved_shared_bytes,
        132: 0,  # multicast objects over NVLink
    }
