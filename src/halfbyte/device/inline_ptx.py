"""PTX instructions as functions of CuTe values: the one place that knows about constraint letters.

CuTe DSL's operators leave rounding, contraction and subnormals to its compiler. Where a result is
promised to the last bit, a kernel names the instruction itself.
"""

from typing import Any

import cutlass.cute as cute
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


def update_by_ptx(text: str, values: Any, operands: tuple[Any, ...] = ()) -> None:
    """Change registers by PTX, in order with other memory accesses.

    Args:
        text: PTX; with n values, `$0` to `$n-1` are the registers, `$2n` and on the operands. Where
            it does not name them, they are only held in place.
        values: a tensor of n numbers in registers, read before and written after.
        operands: CuTe numbers.
    """
    count = cute.size(values)
    before = [values[index].ir_value() for index in range(count)]
    others = [one.ir_value() for one in operands]
    letter = _LETTERS[str(before[0].type)]
    letters = [f"={letter}"] * count
    letters += [str(index) for index in range(count)]
    letters += [_LETTERS[str(one.type)] for one in others]
    result_type = before[0].type
    if count > 1:
        result_type = llvm.StructType.get_literal([result_type] * count)
    result = llvm.inline_asm(
        result_type,
        before + others,
        text,
        ",".join([*letters, "~{memory}"]),
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    for index in range(count):
        after = result
        if count > 1:
            position = ir.DenseI64ArrayAttr.get([index])
            after = llvm.extractvalue(before[0].type, result, position)
        values[index] = values.element_type(after)


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
