"""The options by which a verb spreads its work; the same for every verb that does.

They are added around the verb, which asks `chosen_workers()` for what they say.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
_chosen: ContextVar["WorkerSettings | None"] = ContextVar("workers", default=None)


def with_worker_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Return `verb` with --workers, --cluster and --worker-threads added."""

    @functools.wraps(verb)
    def spread(**given: Any) -> None:
        token = _chosen.set(_read(*(given.pop(name) for name in _OPTIONS)))
        try:
            verb(**given)
        finally:
            _chosen.reset(token)

    signature = inspect.signature(verb)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in _OPTIONS.items()
    ]
    parameters = [*signature.parameters.values(), *added]
    spread.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {**verb.__annotations__, **_OPTIONS}
    return spread


def chosen_workers() -> "WorkerSettings | None":
    """Return what the running verb's options ask for; None for no workers."""
    return _chosen.get()


def _read(workers: int | None, cluster: str | None, threads: int | None) -> "WorkerSettings | None":
    if workers is None and cluster is None and threads is None:
        return None
    from halfbyte.workers.settings import make_worker_settings

    try:
        return make_worker_settings(workers, cluster, threads)
    except UsageError as error:
        raise typer.BadParameter(printable(str(error))) from error
