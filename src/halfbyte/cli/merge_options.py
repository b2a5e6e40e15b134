"""The options by which `convert` merges adapters."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte.cli.added_options import AddedOptions
from halfbyte.errors import UsageError, printable

if TYPE_CHECKING:
    from halfbyte.checkpoints.layer_changes import BindChanges

_OPTIONS: dict[str, Any] = {
    "merge": Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADAPTER[=STRENGTH]",
            help="A LoRA, LoKr or LoHa file, or PEFT directory, that becomes part of the "
            "low-rank branches; strength 1 unless told otherwise. May be repeated.",
        ),
    ],
    "merge_ignore": Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Tensors of the adapters to leave out, e.g. 'lora_te*'. May be repeated.",
        ),
    ],
}


def _read(merge: list[str] | None, ignore: list[str] | None) -> "BindChanges | None":
    if not merge and not ignore:
        return None
    from halfbyte.nn.adapters.conversion_merge import parse_merge, read_merges

    try:
        return read_merges([parse_merge(text) for text in merge or ()], ignore or ())
    except UsageError as error:
        raise typer.BadParameter(printable(str(error))) from error


_ADDED: AddedOptions["BindChanges | None"] = AddedOptions(_OPTIONS, _read, None)


def with_merge_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Return `verb` with --merge and --merge-ignore added."""
    return _ADDED.put_on(verb)


def chosen_merge() -> "BindChanges | None":
    """Return what the running verb is to merge; None for nothing."""
    return _ADDED.chosen.get()
