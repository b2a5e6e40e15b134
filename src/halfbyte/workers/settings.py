"""How many workers and where; checked without Ray."""

from dataclasses import dataclass

from halfbyte.errors import UsageError

MAX_WORKERS = 4096
MAX_THREADS = 1024


@dataclass(frozen=True)
class WorkerSettings:
    """Where units are worked off.

    Attributes:
        workers: processes at a time; None for as many as the cluster has CPUs for.
        cluster: address of a running Ray cluster ("auto", "host:6379", "ray://host:10001"); None
            for processes on this machine.
        threads: torch threads of each worker. The bytes are those of one process with so many.
    """

    workers: int | None = None
    cluster: str | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers and combinations that cannot be meant; UsageError."""
        if self.workers is None and self.cluster is None:
            raise UsageError("neither a number of workers nor a cluster: give --workers, --cluster")
        if self.workers is not None and not 1 <= self.workers <= MAX_WORKERS:
            raise UsageError(f"{self.workers} workers, wanted 1 to {MAX_WORKERS}")
        if not 1 <= self.threads <= MAX_THREADS:
            raise UsageError(f"{self.threads} threads for each worker, wanted 1 to {MAX_THREADS}")
        if self.cluster is not None and not self.cluster.strip():
            raise UsageError("the address of the cluster is empty; 'auto' finds a local one")


def make_worker_settings(
    workers: int | None, cluster: str | None, threads: int | None
) -> WorkerSettings | None:
    """Return the settings that a command line asks for, None for no workers; UsageError."""
    if workers is None and cluster is None:
        if threads is not None:
            raise UsageError(
                "--worker-threads without --workers or --cluster: for a run in one process, "
                "OMP_NUM_THREADS says how many threads"
            )
        return None
    return WorkerSettings(workers, cluster, 1 if threads is None else threads)
