"""The slow, obvious interpreter: PTX in plain Python, one lane at a time, one function a thing.

It shares the syntax tree with the fast core and nothing else: integers are Python integers,
floating-point results are rationals rounded once. The core is compared with it on random programs.
"""

from halfbyte.virtual.interpreter.kernel import run_kernel

__all__ = ["run_kernel"]
