"""Adapters: LoRA, LoKr and LoHa files on 4-bit and float linears, live or merged."""

from halfbyte.nn.adapters.live_adapters import (
    AdaptedLayer,
    AdapterReport,
    add_adapter,
    list_adapters,
    merge_adapters,
    merge_into_records,
    remove_adapter,
    set_adapter_strength,
)
from halfbyte.nn.adapters.low_rank_forms import RankLimits
from halfbyte.nn.adapters.read_adapter import Adapter, read_adapter

__all__ = [
    "AdaptedLayer",
    "Adapter",
    "AdapterReport",
    "RankLimits",
    "add_adapter",
    "list_adapters",
    "merge_adapters",
    "merge_into_records",
    "read_adapter",
    "remove_adapter",
    "set_adapter_strength",
]
