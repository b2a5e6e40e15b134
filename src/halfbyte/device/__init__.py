"""The parts that kernels are made of, in CuTe DSL: ring positions, schedulers, loaders, epilogues.

Imports nothing here: device code needs CuTe, and the host half of the package runs without it.
"""
