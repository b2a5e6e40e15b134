"""How many CTAs and clusters are resident at once.

Registers are not counted: how many a thread needs is decided after PTX.
"""

from halfbyte.arch import Gpu


def count_ctas_per_sm(gpu: Gpu, threads: int, shared_bytes: int) -> int:
    """Return how many CTAs fit on one SM, 0 where not even one does.

    Args:
        gpu: the GPU.
        threads: threads of a CTA.
        shared_bytes: static and dynamic shared memory of a CTA, the system's part not included.
    """
    warps = max(1, -(-threads // gpu.warp_size))
    return min(
        gpu.max_ctas_per_sm,
        gpu.max_warps_per_sm // warps,
        gpu.shared_bytes_per_sm // (shared_bytes + gpu.reserved_shared_bytes),
    )


def count_resident_clusters(gpu: Gpu, ctas_per_cluster: int, ctas_per_sm: int) -> int:
    """Return how many clusters are resident when each SM holds `ctas_per_sm` CTAs.

    A cluster lives in one group of SMs (GPC); without its true size the whole GPU is taken as one
    group, which a real one undercuts for large clusters.
    """
    return gpu.num_sms * ctas_per_sm // ctas_per_cluster
