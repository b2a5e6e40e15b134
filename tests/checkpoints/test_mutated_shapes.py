"""Parts of a wrong shape in the families around nunchaku: an error of ours, never another one."""

import random

import pytest
import torch

from halfbyte.checkpoints.nunchaku import Nunchaku, make_awq_facts, make_w4a4_facts
from halfbyte.checkpoints.svdquant_kernels import SvdquantKernels, SvdquantKernelsProduct
from halfbyte.checkpoints.vllm_omni import VllmOmni, VllmOmniConverted
from halfbyte.errors import FormatError
from tests.checkpoints.test_nunchaku_awq import make_model, pack_like_the_exporter
from tests.checkpoints.test_nunchaku_lite import PAIRS, load_layer
from tests.checkpoints.test_svdquant_kernels import make_parts as make_operands
from tests.checkpoints.test_vllm_omni import make_parts

MUTATIONS = 120
AWQ_NAME = "a.norm1.linear"
CASES = {
    "vllm-omni": lambda: (VllmOmni(), make_parts(), {}),
    "vllm-omni-converted": lambda: (VllmOmniConverted(), make_parts(), {}),
    "awq": lambda: (
        Nunchaku(),
        pack_like_the_exporter(make_model(24, 128), 6),
        make_awq_facts(AWQ_NAME),
    ),
    **{
        f"{kind.name}-{precision}": lambda kind=kind, precision=precision: (
            kind(),
            make_operands(precision),
            {"precision": precision},
        )
        for kind in (SvdquantKernels, SvdquantKernelsProduct)
        for precision in PAIRS
    },
    **{
        f"nunchaku-{precision}": lambda precision=precision: (
            Nunchaku(),
            load_layer(precision),
            make_w4a4_facts("proj", precision, PAIRS[precision]),
        )
        for precision in PAIRS
    },
}


def mutate_shape(shape: list[int], draw: random.Random) -> list[int]:
    kind = draw.choice(["size", "more", "less", "turned", "flat"])
    if kind == "size" and shape:
        place = draw.randrange(len(shape))
        size = max(0, shape[place] + draw.choice([-1, 1, -16, 16, 128, -shape[place]]))
        return [*shape[:place], size, *shape[place + 1 :]]
    if kind == "more":
        return [*shape, 2]
    if kind == "less":
        return shape[:-1]
    return shape[::-1] if kind == "turned" else [torch.Size(shape).numel()]


@pytest.mark.parametrize("case", CASES)
def test_wrong_shape_is_an_error_of_ours(case):
    family, parts, facts = CASES[case]()
    draw = random.Random(case)
    for _ in range(MUTATIONS):
        name = draw.choice(sorted(parts))
        shape = mutate_shape(list(parts[name].shape), draw)
        is_one_number = parts[name].numel() == torch.Size(shape).numel() == 1
        if shape == list(parts[name].shape) or is_one_number:
            continue
        changed = {**parts, name: torch.zeros(shape, dtype=parts[name].dtype)}
        with pytest.raises(FormatError):
            family.decode(changed, facts)
