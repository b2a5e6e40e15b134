"""Where a model holds a module: a shared one stands under several names."""

from torch import nn

from halfbyte.errors import UsageError
from halfbyte.nn.low_rank_stack import get_stacked


def list_places(model: nn.Module, module: nn.Module) -> list[str]:
    """Return every name under which `model` holds `module`."""
    return [name for name, m in model.named_modules(remove_duplicate=False) if m is module]


def replace_module(model: nn.Module, old: nn.Module, replacement: nn.Module) -> None:
    """Put `replacement` wherever the model holds `old`, in the training mode of `old`.

    Raises UsageError where adapters are on `old`: they would be lost without a word.
    """
    if get_stacked(old):
        raise UsageError(
            f"{', '.join(list_places(model, old))}: has adapters ({', '.join(get_stacked(old))}); "
            "merge or remove them before the module is replaced"
        )
    replacement.train(old.training)
    for place in list_places(model, old):
        parent, _, attribute = place.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replacement)
