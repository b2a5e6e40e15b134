"""Tables per GPU: sizes, limits and rates, as data without logic."""

from halfbyte.arch.gpus import GPUS, Gpu, find_gpu

__all__ = ["GPUS", "Gpu", "find_gpu"]
