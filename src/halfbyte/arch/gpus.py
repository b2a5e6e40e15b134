"""The GPUs that halfbyte knows, as frozen records.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (threads,
warps, CTAs, shared memory), PTX ISA "Tensor Memory" (512 columns of 128 lanes), and NVIDIA's
architecture papers and data sheets (SM counts, clocks, L2).
"""

from dataclasses import dataclass

from halfbyte.errors import UsageError

KIB = 1024

# Measured on B200 by others (docs/kernels/gemm_w4a4.md names the sources). SMs that clusters of a
# size can use: a GPC whose SMs are no multiple of the size leaves some idle.
BLACKWELL_SMS_BY_CLUSTER = {1: 148, 2: 148, 4: 132, 8: 120}
BLACKWELL_MEMORY_BYTES_PER_S = 7.26e12  # of HBM, achieved


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model. Sizes are bytes, clocks Hz.

    Attributes:
        name: what `--gpu` takes.
        device_name: what `torch.cuda.get_device_name()` answers.
        target: the PTX target that CuTe DSL compiles for it.
        capability: compute capability (major, minor).
        shared_bytes_per_sm: shared memory of one SM, system-reserved parts included.
        shared_bytes_per_cta: the most a kernel can opt in to.
        default_shared_bytes_per_cta: what a kernel has without opting in.
        reserved_shared_bytes: of each CTA, used by the system.
        tensor_memory_columns: 0 where there is no tensor memory.
        max_cluster: CTAs per cluster without opting in to non-portable sizes.
        max_cluster_opted_in: with it.
        resident_clusters: clusters of 1, 2, ... CTAs that run at once where a CTA takes a whole SM,
            as cudaOccupancyMaxActiveClusters says; () where no such GPU was asked.
    """

    name: str
    device_name: str
    target: str
    capability: tuple[int, int]
    num_sms: int
    clock: float
    memory_bytes: int
    l2_bytes: int
    shared_bytes_per_sm: int
    shared_bytes_per_cta: int
    tensor_memory_columns: int
    max_warps_per_sm: int = 64
    max_ctas_per_sm: int = 32
    max_cluster: int = 8
    max_cluster_opted_in: int = 16
    max_threads_per_cta: int = 1024
    max_block: tuple[int, int, int] = (1024, 1024, 64)
    max_grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    default_shared_bytes_per_cta: int = 48 * KIB
    constant_bytes: int = 64 * KIB
    local_bytes_per_thread: int = 512 * KIB
    registers_per_sm: int = 65536
    reserved_shared_bytes: int = KIB
    warp_size: int = 32
    resident_clusters: tuple[int, ...] = ()

    def count_resident_clusters(self, ctas: int) -> int:
        """Return how many clusters of `ctas` CTAs run at once, a CTA an SM.

        Fewer than the SMs would give: a cluster lies within one group of SMs. Where that was not
        asked of the GPU, what the SMs give.
        """
        if ctas <= len(self.resident_clusters):
            return self.resident_clusters[ctas - 1]
        return self.num_sms // ctas

    @property
    def number(self) -> int:
        """Compute capability as one number: 90, 100, 103, 120."""
        return self.capability[0] * 10 + self.capability[1]


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="b200",
            device_name="NVIDIA B200",
            target="sm_100a",
            capability=(10, 0),
            num_sms=148,
            clock=1.965e9,
            memory_bytes=180 * 10**9,
            l2_bytes=126 * KIB * KIB,
            shared_bytes_per_sm=228 * KIB,
            shared_bytes_per_cta=227 * KIB,
            tensor_memory_columns=512,
        ),
        Gpu(
            name="b300",
            device_name="NVIDIA B300",
            target="sm_103a",
            capability=(10, 3),
            num_sms=148,
            clock=1.965e9,
            memory_bytes=288 * 10**9,
            l2_bytes=126 * KIB * KIB,
            shared_bytes_per_sm=228 * KIB,
            shared_bytes_per_cta=227 * KIB,
            tensor_memory_columns=512,
        ),
        Gpu(
            name="h200",
            device_name="NVIDIA H200",
            target="sm_90a",
            capability=(9, 0),
            num_sms=132,
            clock=1.98e9,
            memory_bytes=141 * 10**9,
            l2_bytes=50 * KIB * KIB,
            shared_bytes_per_sm=228 * KIB,
            shared_bytes_per_cta=227 * KIB,
            tensor_memory_columns=0,
            resident_clusters=(132, 66, 39, 30, 22, 17, 15, 15),
        ),
        Gpu(
            name="rtx5090",
            device_name="NVIDIA GeForce RTX 5090",
            target="sm_120a",
            capability=(12, 0),
            num_sms=170,
            clock=2.407e9,
            memory_bytes=32 * 10**9,
            l2_bytes=96 * KIB * KIB,
            shared_bytes_per_sm=100 * KIB,
            shared_bytes_per_cta=99 * KIB,
            tensor_memory_columns=0,
            max_warps_per_sm=48,
            max_ctas_per_sm=24,
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """Return the record of a GPU by its name, case ignored.

    Raises:
        UsageError: no such GPU; the message lists those there are.
    """
    gpu = GPUS.get(name.lower()) if isinstance(name, str) else None
    if gpu is None:
        raise UsageError(f"unknown GPU {name!r}: choose one of {', '.join(GPUS)}")
    return gpu
