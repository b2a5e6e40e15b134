"""What is compiled ahead of time; and that a kernel's key covers all the code it is made of."""

import ast
from pathlib import Path

import pytest
import torch

import halfbyte
from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import UsageError
from halfbyte.nn import W4A4Linear
from halfbyte.runtime.kernel_key import make_source_key, read_module_text
from halfbyte.runtime.shipped_kernels import KERNELS, list_shipped
from halfbyte.runtime.targets import TARGETS
from tests.random_linears import LinearShape, make_linear

PACKAGE = Path(halfbyte.__file__).parent
DEVICE_CODE = ("halfbyte.device.", "halfbyte.kernels.")


def list_imported(module: str) -> set[str]:
    """Return the modules of `device` and `kernels` that a module imports, lazily or not."""
    names = set()
    for node in ast.walk(ast.parse(read_module_text(module))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith(DEVICE_CODE) and is_module_file(name)}


def is_module_file(name: str) -> bool:
    return (PACKAGE.parent / Path(*name.split("."))).with_suffix(".py").is_file()


def choose_examples() -> list[KernelSource]:
    sources = [source for target in TARGETS for source in list_shipped(target)]
    return list({source.name: source for source in sources}.values())


@pytest.mark.parametrize("source", choose_examples(), ids=lambda source: source.name)
def test_a_source_names_every_module_it_is_compiled_from(source: KernelSource) -> None:
    reached, waiting = set(), set(source.modules)
    while waiting:
        module = waiting.pop()
        reached.add(module)
        waiting |= list_imported(module) - reached
    forgotten = reached - set(source.modules) - {"halfbyte.device.kernel_source"}
    assert forgotten == set(), "a change of these would not compile the kernel again"


@pytest.mark.parametrize("target", TARGETS)
def test_sources_are_for_the_target_and_differ(target: str) -> None:
    sources = list_shipped(target)
    assert {source.target for source in sources} <= {target}
    keys = [make_source_key(source) for source in sources]
    assert len(set(keys)) == len(keys)


def test_one_kernel_can_be_chosen_and_another_name_is_refused() -> None:
    chosen = list_shipped("sm_100a", KERNELS[0])
    assert {source.name for source in chosen} <= {KERNELS[0]}
    with pytest.raises(UsageError, match=f"'nothing'.*{KERNELS[0]}"):
        list_shipped("sm_100a", "nothing")


@pytest.mark.parametrize("mode", ["fp8", "exact"])
def test_a_layer_of_a_shipped_shape_asks_for_shipped_kernels(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[KernelSource] = []
    monkeypatch.setattr(
        "halfbyte.runtime.run_kernel.run_kernel",
        lambda source, *arguments, virtual_gpu: asked.append(source),
    )
    linear = make_linear(LinearShape(n=3072, k=10240, rank=32, dtype=torch.bfloat16))
    module = W4A4Linear(linear, "virtual-h200", mode)
    for m in (1, 64):
        module(torch.zeros(m, 10240, dtype=torch.bfloat16))
    shipped = {(source.name, source.config) for source in list_shipped("sm_90a")}
    assert [source.name for source in asked] == ["quantize_act_wgmma", "gemm_w4_wgmma"] * 2
    assert {(source.name, source.config) for source in asked} <= shipped
