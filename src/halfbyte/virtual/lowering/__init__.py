"""From a kernel's syntax tree to the flat program that the compiled core runs."""

from halfbyte.virtual.lowering.lower import lower_kernel
from halfbyte.virtual.lowering.memory_layout import KernelLayout, make_layout
from halfbyte.virtual.lowering.program import KernelParameter, Program

__all__ = ["KernelLayout", "KernelParameter", "Program", "lower_kernel", "make_layout"]
