"""Where a model holds a module: a shared one stands under several names."""

from torch import nn


def list_places(model: nn.Module, module: nn.Module) -> list[str]:
    """Return every name under which `model` holds `module`."""
    return [name for name, m in model.named_modules(remove_duplicate=False) if m is module]


def replace_module(model: nn.Module, old: nn.Module, replacement: nn.Module) -> None:
    """Put `replacement` wherever the model holds `old`, in the training mode of `old`."""
    replacement.train(old.training)
    for place in list_places(model, old):
        parent, _, attribute = place.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replacement)
