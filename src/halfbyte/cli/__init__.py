"""The command line: one file per verb, parsing and printing only; exit codes 0, 1 and 2."""
