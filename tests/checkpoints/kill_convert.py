"""Kills convert_checkpoint at every system call that changes the disk, reruns it, compares bytes.

Usage: python -m tests.checkpoints.kill_convert IN OUT STRIDE {--force}; prints JSON.
"""

import json
import sys
from pathlib import Path

from halfbyte.checkpoints.convert import ConvertRequest, convert_checkpoint
from tests.svdquant.kill_everywhere import make_old_output, try_every_call


def main() -> None:
    """Kill at call 1, 1 + STRIDE, ... until a run gets through unharmed."""
    source, target, stride = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    force = "--force" in sys.argv
    old = make_old_output(target) if force else None
    request = ConvertRequest(source, target, "halfbyte", verify=True, force=force)
    found = try_every_call(lambda: convert_checkpoint(request), target, stride, old)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
