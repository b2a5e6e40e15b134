"""Write the conformance programs as files that `silicon_runner.py` runs on a machine with a GPU.

python -m tests.virtual.conformance.export out/conformance
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from .programs import list_programs

RUNNER = Path(__file__).with_name("silicon_runner.py")


def export_programs(directory: Path) -> int:
    """Write `<name>.ptx`, `<name>.json` and `<name>.<buffer>.npy` of each; return their count."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    programs = list_programs()
    for program in programs:
        (directory / f"{program.name}.ptx").write_text(program.ptx)
        description = {**program.describe(), "digest": program.digest()}
        (directory / f"{program.name}.json").write_text(json.dumps(description))
        for buffer in (*program.inputs, *program.outputs):
            np.save(directory / f"{program.name}.{buffer.name}.npy", buffer.data)
    shutil.copy(RUNNER, directory / RUNNER.name)
    return len(programs)


if __name__ == "__main__":
    print(export_programs(Path(sys.argv[1])), "programs written to", sys.argv[1])
