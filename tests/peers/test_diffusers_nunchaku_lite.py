"""diffusers' own configuration class takes what is written for it."""

import pytest
import torch

from halfbyte.checkpoints.family import Layer
from halfbyte.checkpoints.nunchaku_lite import make_lite_config
from halfbyte.formats.block_format import get_format
from halfbyte.formats.quantized_linear import QuantizedLinear
from tests.random_linears import LinearShape, make_linear, make_weight

configs = pytest.importorskip(
    "diffusers.quantizers.quantization_config",
    reason="diffusers is not installed: pip install 'halfbyte[peers]'",
)
if not hasattr(configs, "NunchakuLiteQuantizationConfig"):
    pytest.skip("this diffusers has no nunchaku_lite", allow_module_level=True)

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("pair", [("nvfp4", "nvfp4_nunchaku"), ("int4", "int4")])
@pytest.mark.parametrize("has_awq", [False, True])
def test_written_configuration_is_accepted_as_it_stands(pair, has_awq):
    layers = {"blocks.0.up": Layer("blocks.0.up", make_linear(LinearShape(128, 128, 16), pair))}
    if has_awq:
        linear = QuantizedLinear(make_weight(8, 64, get_format("uint4")))
        layers["blocks.0.norm1.linear"] = Layer("blocks.0.norm1.linear", linear)
    written = make_lite_config(layers)
    method = written.pop("quant_method")
    config = configs.NunchakuLiteQuantizationConfig(**written)
    assert config.quant_method == method
    assert config.compute_dtype == torch.bfloat16
    assert config.svdq_w4a4["targets"] == ["blocks.0.up"]
    assert (config.awq_w4a16 is not None) == has_awq
