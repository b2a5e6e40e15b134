"""The default mode beside torchao, nvidia-modelopt and compressed-tensors on one tensor.

The three tools disagree with each other on some bfloat16 tensors: values that lie exactly
between two codes fall to a side by the last bit of each tool's divisor. The default takes
torchao's scales and modelopt's division, so it has their bytes wherever these two agree.
"""

import pytest
import torch

from halfbyte.formats.quantize import quantize
from tests.peers.tensors import CASES, case_id, make_tensor

pytestmark = pytest.mark.peers

TOOLS = ("torchao", "modelopt", "compressed-tensors")  # held to the tools by the other files


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_default_has_the_bytes_that_the_tools_agree_on(case: tuple) -> None:
    x = make_tensor(case)
    ours = quantize(x, "nvfp4")
    theirs = {mode: quantize(x, "nvfp4", mode=mode) for mode in TOOLS}
    scales = {mode: t.scales.view(torch.uint8) for mode, t in theirs.items()}
    assert torch.equal(ours.scales.view(torch.uint8), scales["torchao"])
    if torch.equal(scales["torchao"], scales["modelopt"]):
        assert torch.equal(ours.data, theirs["modelopt"].data)
    if torch.equal(theirs["torchao"].data, theirs["compressed-tensors"].data) and torch.equal(
        theirs["torchao"].data, theirs["modelopt"].data
    ):
        assert torch.equal(ours.data, theirs["torchao"].data)


def test_float32_gaussian_bytes_are_the_same_in_every_tool() -> None:
    x = make_tensor(("gaussian", (256, 4096), torch.float32))
    ours = quantize(x, "nvfp4")
    for mode in TOOLS:
        theirs = quantize(x, "nvfp4", mode=mode)
        assert torch.equal(ours.data, theirs.data)
        assert torch.equal(ours.scales.view(torch.uint8), theirs.scales.view(torch.uint8))
