"""quack-kernels: block-scaled GEMM of all formats, quantized output and packed weights."""

import os

# Quantizing on the host is not what is tried here: no compiling of it.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from cases import case, check_as_precise, check_close, check_same, normals, run_cases
from quack.blockscaled import BlockScaledOperand
from quack.gemm_interface import gemm, gemm_blockscaled_ref
from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight
from quack.operand_transform.formats import decode_format
from quack.rounding import RoundingMode

BF16 = torch.bfloat16


def _check_formats(format_a: str, format_b: str, m: int = 256, n: int = 128, k: int = 256) -> None:
    a = BlockScaledOperand.quantize(normals((m, k), BF16), format_a)
    b = BlockScaledOperand.quantize(normals((n, k), BF16), format_b).mT
    out = gemm(a, b, tuned=False, out_dtype=torch.float32)
    check_close(out, gemm_blockscaled_ref(a, b, out_dtype=torch.float32))


@case
def mxfp8() -> None:
    _check_formats("mxfp8_e4m3", "mxfp8_e4m3")


@case
def mxfp8_mixed() -> None:
    _check_formats("mxfp8_e5m2", "mxfp8_e4m3")


@case
def mxfp4() -> None:
    _check_formats("mxfp4", "mxfp4")


@case
def nvfp4() -> None:
    _check_formats("nvfp4", "nvfp4")


@case
def mxfp6() -> None:
    _check_formats("mxfp6_e2m3_packed", "mxfp6_e2m3_packed")
    _check_formats("mxfp6_e3m2_packed", "mxfp8_e4m3")


@case
def mxfp8_by_mxfp4() -> None:
    _check_formats("mxfp8_e4m3", "mxfp4")


def _check_quantized_output(name: str) -> None:
    a = normals((256, 64), BF16)
    b = normals((128, 64), BF16).mT
    out = gemm(a, b, out_dtype=name, tuned=False)
    expected = BlockScaledOperand.quantize((a.float() @ b.float()), name)
    check_close(out.dequantize(torch.float32), expected.dequantize(torch.float32))


@case
def output_mxfp8() -> None:
    _check_quantized_output("mxfp8_e4m3")


@case
def output_nvfp4() -> None:
    _check_quantized_output("nvfp4")


@case
def stochastic_rounding() -> None:
    """Whole numbers need no rounding: every mode gives them unchanged."""
    a = torch.randint(-2, 3, (128, 64)).to(BF16).to("cuda")
    b = torch.randint(-2, 3, (128, 64)).to(BF16).to("cuda").mT
    out = gemm(a, b, rounding_mode=RoundingMode.RS, sr_seed=7, tuned=False)
    check_same(out.float(), a.float() @ b.float())


def _check_packed_weight(name: str) -> None:
    fmt = decode_format(name)
    activation = normals((64, 256), BF16)
    quantized, scales = fmt.quantize_reference(normals((128, 256), BF16, 0.25))
    blob, scale_blob = prepare_w4_weight(quantized, scales, name)
    out = gemm_w4a16(activation, blob, scale_blob, wformat=name)
    weight = fmt.dequant_reference(quantized, scales).double()
    # The kernel multiplies weights that are rounded to bfloat16.
    same_precision = (activation.double() @ weight.to(BF16).double().mT).to(BF16)
    check_as_precise(out, same_precision, activation.double() @ weight.mT)


@case
def weight_nvfp4() -> None:
    _check_packed_weight("nvfp4")


@case
def weight_int4() -> None:
    _check_packed_weight("int4")


@case
def weight_mxfp4() -> None:
    _check_packed_weight("mxfp4")


@case
def weight_mxfp8() -> None:
    _check_packed_weight("mxfp8")


if __name__ == "__main__":
    run_cases()
