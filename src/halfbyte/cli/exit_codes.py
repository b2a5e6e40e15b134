"""The exit codes of the `halfbyte` program."""

EXIT_CLEAN = 0
EXIT_FINDINGS = 1  # also an error in the input or the machine
EXIT_MISUSE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells report for Ctrl-C
