"""Run every repository check and return 1 if any has findings."""

import subprocess
import sys
from pathlib import Path

CHECKS = ("check_sizes.py", "check_imports.py", "check_names.py")


def main() -> int:
    """Run the checks one after the other, each as its own program."""
    folder = Path(__file__).resolve().parent
    codes = [
        subprocess.run([sys.executable, str(folder / name), *sys.argv[1:]], check=False).returncode
        for name in CHECKS
    ]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
