"""Units of work on Ray: local processes or a running cluster, and what happens when they die.

The coordinator, which runs this, alone writes files. A unit whose process or node died is given
out again; a unit that takes three processes down with it ends the run, whose journal stays.
"""

import os
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final, NoReturn

from halfbyte.errors import HalfbyteError, MissingDependencyError, UsageError, WorkerError
from halfbyte.formats.output_files import WorkUnit
from halfbyte.workers.identity import Identity
from halfbyte.workers.job import Job, OpenJob, UnitResult
from halfbyte.workers.remote import (
    REFUSED,
    measure_chunks,
    unpack_result,
    work_off_remotely,
)
from halfbyte.workers.settings import WorkerSettings

MAX_DEATHS: Final = 3  # of processes that one unit may take down
POLL_SECONDS: Final = 2.0
GRACE_SECONDS: Final = 60.0  # for a cluster without a CPU: nodes may be joining
CONNECT_SECONDS: Final = 10.0
OBJECT_STORE_BYTES: Final = 256 * 2**20  # of local workers; results beyond it go to the disk
_AGAIN = "what is done is kept: give the same command again to continue"

OnNote = Callable[[str], None]


class RayWorkers:
    """Connected workers; a context manager that gives back what it started."""

    def __init__(self, settings: WorkerSettings, on_note: OnNote = lambda text: None) -> None:
        """Start local workers or connect to the cluster.

        Args:
            settings: how many and where.
            on_note: called with a message when a worker died.

        Raises:
            MissingDependencyError: Ray is absent.
            UsageError: no cluster answers at the address, or it has too few CPUs for a worker.
        """
        self.settings = settings
        self.on_note = on_note
        self._ray = import_ray()
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            self._connect()
        # Two units for each local process, so that none waits for the coordinator's disk.
        self._is_counted_by_ray = self._is_ours and settings.cluster is None

    def __enter__(self) -> "RayWorkers":
        """Return the workers."""
        return self

    def __exit__(self, *error: object) -> None:
        """End local workers; leave a cluster."""
        if self._is_ours:
            self._ray.shutdown()

    def run(
        self, job: Job, here: OpenJob, units: Sequence[WorkUnit]
    ) -> Iterator[tuple[WorkUnit, UnitResult]]:
        """Yield every unit with its result, as they come.

        Args:
            job: what is sent to the workers.
            here: the same job, open in this process; its input is what workers must see.
            units: in any order; large ones are given out first, so that none is left at the end.
                Those without layers are yielded for the caller to copy while workers work.

        Raises:
            WorkerError: workers are gone, unfit or read another input.
            HalfbyteError: as the job raises it.
        """
        waiting = sorted((u for u in units if u.layers), key=lambda unit: unit.num_bytes)
        copies = [unit for unit in units if not unit.layers]
        threads = self.settings.threads
        identity, payload = asdict(Identity.read(threads)), self._ray.put(pickle.dumps(job))
        task = self._ray.remote(num_cpus=threads, max_retries=0, scheduling_strategy="SPREAD")
        remote = task(work_off_remotely)
        deaths: Counter[str] = Counter()
        running: dict[Any, WorkUnit] = {}

        def give_out() -> None:
            while waiting and len(running) < self._count_window():
                unit = waiting.pop()
                running[remote.remote(identity, threads, payload, pickle.dumps(unit))] = unit

        try:
            give_out()
            while running:
                while copies and not self._is_any_ready(list(running)):
                    yield copies.pop(), UnitResult({}, [])
                ref = self._wait(list(running))
                unit = running.pop(ref)
                answer = self._get(ref, unit, deaths)
                del ref  # the engine keeps a result for as long as somebody knows its name
                if answer is None:
                    waiting.append(unit)
                give_out()  # before the caller writes: no worker waits for the disk
                if answer is not None:
                    self._check(answer, here, unit)
                    yield unit, unpack_result(answer)
            for unit in copies:
                yield unit, UnitResult({}, [])
        finally:
            self._cancel(list(running))

    def _connect(self) -> None:
        # Nothing is reported to anybody; an operator's own setting of the variable stands.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        workers, address = self.settings.workers, self.settings.cluster
        try:
            if address is not None:
                self._ray.init(address=address, **quiet)
                return
            self._ray.init(
                address="local",
                num_cpus=(workers or 1) * self.settings.threads,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
        except (OSError, ValueError, RuntimeError) as error:
            what = "local workers" if address is None else f"the Ray cluster at {address!r}"
            raise UsageError(
                f"{what} cannot be reached: {error}; Ray's own messages say whether it is down or "
                "wants an authentication token; --workers alone takes processes on this machine"
            ) from error

    def _count_window(self) -> int:
        """Return how many units may be given out at a time."""
        if self.settings.workers is not None:
            return self.settings.workers * (2 if self._is_counted_by_ray else 1)
        fitting = int(self._count_cpus() // self.settings.threads)
        return max(1, 2 * fitting)

    def _count_cpus(self) -> float:
        return float(self._ray.cluster_resources().get("CPU", 0.0))

    def _is_any_ready(self, running: list[Any]) -> bool:
        try:
            return bool(self._ray.wait(running, timeout=0)[0])
        except (self._ray.exceptions.RayError, OSError) as error:
            self._raise_lost(error)

    def _wait(self, running: list[Any]) -> Any:
        """Return one finished task; WorkerError where nothing is left that could finish it."""
        barren_since: float | None = None
        while True:
            try:
                ready, _ = self._ray.wait(running, timeout=POLL_SECONDS)
                if ready:
                    return ready[0]
                has_room = self._count_cpus() >= self.settings.threads
            except (self._ray.exceptions.RayError, OSError) as error:
                self._raise_lost(error)
            now = time.monotonic()
            barren_since = None if has_room else (barren_since or now)
            if barren_since is not None and now - barren_since >= GRACE_SECONDS:
                raise WorkerError(
                    f"no worker is left: for {GRACE_SECONDS:.0f} s no node had "
                    f"{self.settings.threads} CPUs for one; {_AGAIN}"
                )

    def _get(self, ref: Any, unit: WorkUnit, deaths: Counter[str]) -> dict[str, Any] | None:
        """Return a task's answer, None where its process died and the unit is to be redone."""
        errors = self._ray.exceptions
        try:
            answer: dict[str, Any] = self._ray.get(ref)
        except errors.RayTaskError as error:
            _raise_cause(error)
        except (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        ) as error:
            deaths[unit.name] += 1
            kind = type(error).__name__
            if deaths[unit.name] >= MAX_DEATHS:
                raise WorkerError(
                    f"{unit.name}: {MAX_DEATHS} workers died at it, the last by {kind}; too little "
                    f"memory for this layer is the usual cause; {_AGAIN}"
                ) from error
            self.on_note(f"a worker died at {unit.name} ({kind}); the unit is redone")
            return None
        except errors.RayError as error:
            self._raise_lost(error)
        return answer

    def _check(self, answer: dict[str, Any], here: OpenJob, unit: WorkUnit) -> None:
        if REFUSED in answer:
            raise WorkerError(
                f"{answer[REFUSED]}: its bytes might differ from this process's; install the same "
                f"halfbyte and torch there, or run where the workers run; {_AGAIN}"
            )
        if answer["source_checksum"] != measure_chunks(here.iter_source_bytes(unit)):
            raise WorkerError(
                f"{answer['where']} reads another input than this process: the bytes of "
                f"{', '.join(unit.layers)} differ; give all the same file"
            )

    def _cancel(self, running: list[Any]) -> None:
        for ref in running:
            try:
                self._ray.cancel(ref, force=True)
            except Exception:
                return  # there is nobody left to cancel anything

    def _raise_lost(self, error: Exception) -> NoReturn:
        raise WorkerError(f"the workers are lost: {error}; {_AGAIN}") from error


def check_workers(settings: WorkerSettings | None) -> None:
    """Find out before any work whether workers could be had.

    Ray itself waits for minutes for a cluster that is not there.

    Raises:
        MissingDependencyError: Ray is absent.
        UsageError: nothing listens at the cluster's address.
    """
    if settings is None:
        return
    import_ray()
    address = settings.cluster
    if address is None or address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(
            f"cluster {address!r}: wanted host:port, ray://host:port or auto; `ray status` on a "
            "node shows the address"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"no Ray cluster at {address}: {error}; start one with `ray start --head`, or give "
            "--workers alone for processes on this machine"
        ) from error


@contextmanager
def start_workers(
    settings: WorkerSettings | None, on_note: OnNote = lambda text: None
) -> Iterator[RayWorkers | None]:
    """Yield connected workers, or None where none are asked for."""
    if settings is None:
        yield None
        return
    with RayWorkers(settings, on_note) as workers:
        yield workers


def import_ray() -> Any:
    """Return the package; MissingDependencyError names what to install."""
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingDependencyError(
            "workers need Ray, which is not installed; run: pip install 'halfbyte[cluster]'"
        ) from error
    return ray


def _raise_cause(error: Any) -> NoReturn:
    """Raise what a task raised, as if it had been raised here."""
    cause = error.cause
    if isinstance(cause, HalfbyteError):
        raise cause from None
    if isinstance(cause, ImportError | AttributeError):
        raise WorkerError(
            f"a worker has no halfbyte, or another one ({cause}); install the same version on "
            f"every node; {_AGAIN}"
        ) from error
    raise WorkerError(f"a worker failed: {type(cause).__name__}: {cause}; {_AGAIN}") from error
