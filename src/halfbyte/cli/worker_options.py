"""The options by which a verb spreads its work; the same for every verb that does.

They are added around the verb, which asks `chosen_workers()` for what they say.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte.cli.added_options import AddedOptions
from halfbyte.errors import UsageError, printable

if TYPE_CHECKING:
    from halfbyte.workers.settings import WorkerSettings

_OPTIONS: dict[str, Any] = {
    "workers": Annotated[
        int | None,
        typer.Option(
            help="Worker processes on this machine, or with --cluster the most there. The same "
            "bytes as one process of --worker-threads threads. Needs halfbyte[cluster]."
        ),
    ],
    "cluster": Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="A running Ray cluster: host:port, ray://host:port or auto. Its nodes must be "
            "able to read IN under the same path.",
        ),
    ],
    "worker_threads": Annotated[
        int | None, typer.Option(help="Threads of each worker, 1 unless told otherwise.")
    ],
}


def _read(workers: int | None, cluster: str | None, threads: int | None) -> "WorkerSettings | None":
    if workers is None and cluster is None and threads is None:
        return None
    from halfbyte.workers.settings import make_worker_settings

    try:
        return make_worker_settings(workers, cluster, threads)
    except UsageError as error:
        raise typer.BadParameter(printable(str(error))) from error


_ADDED: AddedOptions["WorkerSettings | None"] = AddedOptions(_OPTIONS, _read, None)


def with_worker_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Return `verb` with --workers, --cluster and --worker-threads added."""
    return _ADDED.put_on(verb)


def chosen_workers() -> "WorkerSettings | None":
    """Return what the running verb's options ask for; None for no workers."""
    return _ADDED.chosen.get()
