"""halfbyte::w4a4_linear: the whole linear layer as one op, which is what `nn.W4A4Linear` calls."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from halfbyte.ops import blackwell, hopper
from halfbyte.ops.backends import check_backend, find_layout, see_session
from halfbyte.ops.checks import check_device, check_input, check_same_device, refuse_gradients
from halfbyte.ops.dense import DensePlacer, check_no_function, multiply_dense
from halfbyte.ops.hopper_modes import DENSE, check_mode
from halfbyte.ops.kernel_tensors import check_kernel_dtype
from halfbyte.ops.linear_parts import LinearSpec, check_part_count, decode_spec, make_linear
from halfbyte.ops.next_input import check_function
from halfbyte.ops.placed_linears import find_placed

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def _list_watchers() -> tuple[Callable[[], Any], ...]:
    """Return what tells whether a mode, transform, tracer or profiler would see a call of an op.

    torch has no public name for them. A version that lacks one has every call dispatched: the one
    function that is returned then says that somebody may be watching.
    """
    try:
        return (
            torch._C._len_torch_dispatch_stack,
            torch._C._len_torch_function_stack,
            torch._C._functorch.peek_interpreter_stack,
            torch._C._get_tracing_state,
            torch._C._autograd._profiler_enabled,
            torch._ops._len_torch_dispatch_stack_pre_dispatch,
        )
    except AttributeError:
        return (lambda: True,)


_WATCHERS: Final = _list_watchers()


@torch.library.custom_op(
    "halfbyte::w4a4_linear",
    mutates_args=(),
    schema='(Tensor x, Tensor[] linear, str spec, str backend="auto", '
    'str activation="none", str mode="auto") -> Tensor',
)
def w4a4_linear(
    x: torch.Tensor,
    linear: Sequence[torch.Tensor],
    spec: str,
    backend: str = "auto",
    activation: str = "none",
    mode: str = "auto",
) -> torch.Tensor:
    """Return y [M, N] in x's dtype, rounded once; see `halfbyte.reference.w4a4_linear`.

    On GPUs lora_act is rounded to x's dtype in between. On Hopper "auto" may take another kernel
    for another M: a row alone and in a batch then differ as two accuracies do.

    Args:
        x: [M, K] float16, bfloat16 or (on the CPU) float32, any strides.
        linear: the tensor list of `linear_parts.list_parts`.
        spec: `LinearSpec.encode()` of the linear.
        backend: one of `backends.BACKENDS`.
        activation: function of the float32 sums: "none", "gelu", "gelu_tanh" or "silu"; on Hopper
            and in mode "bf16" only "none".
        mode: one of `hopper_modes.MODES`.

    A NaN or an infinity in a quantized x makes its row of y NaN, other rows do not change.

    Raises FormatError for shapes and dtypes, UsageError for an unknown backend or mode;
    UnsupportedHardwareError where no kernel exists for x's device or the formats.
    """
    return _run_linear(x, linear, decode_spec(spec), (backend, activation, mode))


def call_w4a4_linear(
    x: torch.Tensor, linear: Sequence[torch.Tensor], spec: LinearSpec, backend: str, mode: str
) -> torch.Tensor:
    """Return what `w4a4_linear` does; it takes the host less where nothing watches the call.

    The dispatcher and the layers of a Python op take longer than all that the op checks. They are
    left out in eager mode, for plain tensors of which none asks for a gradient.
    """
    if not torch.compiler.is_compiling() and _is_unwatched() and _are_plain(x, linear):
        return _run_linear(x, linear, spec, (backend, "none", mode))
    y: torch.Tensor = w4a4_linear(x, linear, spec.encode(), backend, "none", mode)
    return y


def _is_unwatched() -> bool:
    """Return whether no mode, transform, tracer or profiler would see a call of an op."""
    return not any(watcher() for watcher in _WATCHERS)


def _are_plain(x: torch.Tensor, linear: Sequence[torch.Tensor]) -> bool:
    """Return whether ops of these tensors are calls of their kernels: no subclass, no gradient."""
    if type(x) not in _PLAIN or x.is_meta:
        return False
    asks = torch.is_grad_enabled()
    if asks and x.requires_grad:
        return False
    for part in linear:
        if type(part) not in _PLAIN or part.is_meta or (asks and part.requires_grad):
            return False
    return True


def _run_linear(
    x: torch.Tensor,
    linear: Sequence[torch.Tensor],
    parsed: LinearSpec,
    call: tuple[str, str, str],
) -> torch.Tensor:
    """Return y of a linear for a call's backend, activation and mode, after all checks."""
    backend, activation, mode = call
    with see_session():
        check_part_count(linear)
        check_input(x, parsed)
        check_function(activation)
        check_mode(mode)
        chosen = check_device("w4a4_linear", x.device, linear, backend)
        if chosen.target is not None:
            check_kernel_dtype("x", x.dtype)
        if mode == DENSE:
            check_no_function(activation, "mode 'bf16'")
            return multiply_dense(x, find_placed(linear, parsed, DensePlacer(x.dtype)))
        if chosen.layout == "hopper":
            check_no_function(activation, "Hopper's kernel")
            shape = (x.shape[0], x.dtype)
            return hopper.run_linear(x, hopper.choose_placed(linear, parsed, shape, mode), chosen)
        if chosen.layout == "blackwell":
            placed = find_placed(linear, parsed, blackwell.BlackwellPlacer(x.dtype))
            return blackwell.run_linear(x, placed, chosen, activation)
        from halfbyte import cpu

        return cpu.w4a4_linear(x, make_linear(linear, parsed), activation)


refuse_gradients(w4a4_linear)


@w4a4_linear.register_fake
def _(
    x: torch.Tensor,
    linear: Sequence[torch.Tensor],
    spec: str,
    backend: str = "auto",
    activation: str = "none",
    mode: str = "auto",
) -> torch.Tensor:
    check_backend(backend)
    check_mode(mode)
    check_input(x, decode_spec(spec))
    check_function(activation)
    check_part_count(linear)
    check_same_device(x.device, linear)
    if find_layout("w4a4_linear", x.device, backend) != "cpu":
        check_kernel_dtype("x", x.dtype)
    return x.new_empty((x.shape[0], linear[0].shape[0]))
