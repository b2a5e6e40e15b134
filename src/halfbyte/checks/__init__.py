"""Static checks over PTX, SASS and configurations: one check per file, each a list of findings.

Layer: checks, behind `virtual` and `timing`, before everything that imports CuTe. A check reads
text, bytes and records; it runs nothing. Rules: docs/checks.md.
"""
