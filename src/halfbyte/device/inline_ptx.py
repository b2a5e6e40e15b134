"""PTX instructions as functions of CuTe values: the one place that knows about constraint letters.

CuTe DSL's operators leave rounding, contraction and subnormals to its compiler. Where a result is
promised to the last bit, a kernel names the instruction itself.
"""

from typing import Any

from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

_LETTERS = {"i16": "h", "i32": "r", "i64": "l", "f32": "f"}  # by MLIR type


def emit_ptx(text: str, result_types: tuple[Any, ...], operands: tuple[Any, ...]) -> Any:
    """Return the result, or a tuple of results, of PTX that reads and writes registers only.

    Args:
        text: PTX; `$0` and on are the results, then the operands.
        result_types: CuTe types of the results, at least one.
        operands: CuTe numbers.
    """
    return _emit(text, result_types, operands, touches_memory=False)


def emit_memory_ptx(text: str, result_types: tuple[Any, ...], operands: tuple[Any, ...]) -> Any:
    """Return what `emit_ptx` does, None without results, in order with other memory accesses."""
    return _emit(text, result_types, operands, touches_memory=True)


def _emit(
    text: str, result_types: tuple[Any, ...], operands: tuple[Any, ...], *, touches_memory: bool
) -> Any:
    mlir_types = [one.mlir_type for one in result_types]
    values = [one.ir_value() if hasattr(one, "ir_value") else one for one in operands]
    letters = [f"={_LETTERS[str(one)]}" for one in mlir_types]
    letters += [_LETTERS[str(one.type)] for one in values]
    result_type: Any = None
    if len(mlir_types) == 1:
        result_type = mlir_types[0]
    elif mlir_types:
        result_type = llvm.StructType.get_literal(mlir_types)
    result = llvm.inline_asm(
        result_type,
        values,
        text,
        ",".join([*letters, "~{memory}"] if touches_memory else letters),
        has_side_effects=touches_memory,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if not mlir_types:
        return None
    if len(mlir_types) == 1:
        return result_types[0](result)
    return tuple(
        one(llvm.extractvalue(mlir_type, result, ir.DenseI64ArrayAttr.get([index])))
        for index, (one, mlir_type) in enumerate(zip(result_types, mlir_types, strict=True))
    )
