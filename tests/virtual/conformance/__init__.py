"""Conformance: the same small PTX programs on the virtual GPU and on silicon (one H200)."""
