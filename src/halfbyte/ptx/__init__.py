"""PTX front end: text to syntax tree and back, names, control flow, liveness, uniformity.

Nothing here runs a program; `halfbyte.virtual` does. Facts are those of the PTX ISA document.
"""
