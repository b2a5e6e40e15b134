"""`python -m halfbyte.bench ...` is `halfbyte bench ...`: it hands over to the program."""

import os
import sys

if __name__ == "__main__":
    command = [sys.executable, "-m", "halfbyte.cli.main", "bench", *sys.argv[1:]]
    os.execv(sys.executable, command)
