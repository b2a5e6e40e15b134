"""Which accuracy a layer is run with on Hopper, as a contract, and what "auto" takes.

| mode | activations | weights in memory | contract |
|---|---|---|---|
| exact | the layer's own format | 4-bit | the cpu backend's numbers, up to the order of sums |
| fp8 | E4M3, a scale a token | 4-bit, E4M3 in registers | no less accurate than exact |
| int8 | INT8, a scale a token | 4-bit, INT4 alone | no less accurate than exact |
| bf16 | x itself | 16-bit in x's dtype, low rank merged: 4 times | no less accurate than exact |
| auto | | | the fastest that was measured of these |

Hopper has no 4-bit tensor cores, so that 4-bit activations cost accuracy there and buy no time: it
is the mode that says which one is wanted (docs/design/0023-hopper-modes.md). The cpu backend and
Blackwell have one kernel; every mode but bf16 is that one.
"""

from typing import Final

from halfbyte.errors import UsageError
from halfbyte.ops.linear_parts import LinearSpec

MODES: Final = ("auto", "exact", "fp8", "int8", "bf16")
TOKENS: Final = ("both", "prefill", "decode")
DENSE: Final = "bf16"

# By weight element, what "auto" may take instead of the layer's own activations, fastest first.
_KERNEL_MODES: Final[dict[str, tuple[str, ...]]] = {
    "e2m1": ("fp8", "exact"),
    "int4": ("fp8", "int8", "exact"),
}


def check_mode(name: object) -> None:
    """Raise UsageError unless `name` is one of MODES."""
    if name not in MODES:
        raise UsageError(f"mode {name!r} is unknown; choose one of {', '.join(MODES)}")


def check_tokens(name: object) -> None:
    """Raise UsageError unless `name` is one of TOKENS."""
    if name not in TOKENS:
        raise UsageError(f"tokens {name!r} is unknown; choose one of {', '.join(TOKENS)}")


def list_kernel_modes(spec: LinearSpec) -> tuple[str, ...]:
    """Return the modes of the 4-bit kernels that "auto" may run a layer in; [] for none.

    None for a weight-only layer: its x has 16 bits by definition, and fewer would be less accurate.
    """
    if spec.activation is None:
        return ()
    return _KERNEL_MODES.get(spec.block_format.element, ())


def choose_split_mode(spec: LinearSpec, mode: str) -> str:
    """Return the mode of `quantize_act_lora` and `gemm_w4a4`, which must agree for every M.

    Raises UsageError for bf16, which quantizes nothing.
    """
    if mode == DENSE:
        raise UsageError(
            "mode 'bf16' quantizes no activations: call w4a4_linear, or name a kernel's mode"
        )
    if mode != "auto":
        return mode
    # not by the values of a weight either: INT4's code -8 does not fit fp8
    return "int8" if spec.block_format.element == "int4" else "fp8"
