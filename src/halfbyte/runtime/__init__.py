"""What this machine has and what can run on it, and compiled kernels: from source to launch.

Imports no torch by itself. Ops launch through `run_kernel.run_kernel`.
"""

import os


def use_artifacts(path: str | os.PathLike[str]) -> None:
    """Look for compiled kernels in this folder first; `halfbyte build` makes such folders.

    Raises:
        UsageError: there are no artifacts in it.
        CheckpointError: another version of halfbyte built them, or an entry is damaged.
    """
    from halfbyte.runtime import artifact

    artifact.use_artifacts(path)
