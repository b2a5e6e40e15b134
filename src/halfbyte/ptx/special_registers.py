"""The special registers of PTX and their types (PTX ISA, "Special Registers")."""

_VECTORS = ("tid", "ntid", "ctaid", "nctaid")
_CLUSTER_VECTORS = ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
_PLAIN_U32 = (
    "laneid warpid nwarpid smid nsmid cluster_ctarank cluster_nctarank clock clock_hi "
    "lanemask_eq lanemask_le lanemask_lt lanemask_ge lanemask_gt globaltimer_lo globaltimer_hi "
    "total_smem_size aggr_smem_size dynamic_smem_size reserved_smem_offset_begin "
    "reserved_smem_offset_end reserved_smem_offset_cap"
)

SPECIAL_REGISTERS: dict[str, str] = {
    **{f"%{name}.{axis}": "u32" for name in _VECTORS + _CLUSTER_VECTORS for axis in "xyzw"},
    **{f"%{name}": "u32" for name in _PLAIN_U32.split()},
    **dict.fromkeys(("%gridid", "%clock64", "%globaltimer", "%current_graph_exec"), "u64"),
    "%is_explicit_cluster": "pred",
    **{f"%pm{index}": "u32" for index in range(8)},
    **{f"%pm{index}_64": "u64" for index in range(8)},
    **{f"%envreg{index}": "b32" for index in range(32)},
    **{f"%reserved_smem_offset_{index}": "b32" for index in range(2)},
}

# `%tid` alone is the vector of its components.
SPECIAL_VECTORS = frozenset(f"%{name}" for name in _VECTORS + _CLUSTER_VECTORS)


def is_special_register(name: str) -> bool:
    """Return whether `name` (percent sign included) is a special register or a vector of them."""
    return name in SPECIAL_REGISTERS or name in SPECIAL_VECTORS
