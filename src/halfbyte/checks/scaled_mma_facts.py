"""Check: every block-scaled MMA of a kernel is the one that was meant.

Four facts, each with the line or the bytes that show it: the dtype of the scales, kind and shape of
the MMA, the element type of its TMA loads, and the layout of the scales on their way from global
memory through shared to tensor memory. ptxas accepts every wrong combination of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfbyte.checks.finding import CheckFinding, CheckReport, Evidence, Severity
from halfbyte.checks.kernel_text import KernelText
from halfbyte.checks.register_values import RegisterValues, find_first_pass
from halfbyte.checks.scaled_mma import ScaledMma, ScaleSource, list_scaled_mma
from halfbyte.checks.tma_loads import TmaLoad
from halfbyte.errors import UsageError
from halfbyte.virtual.tensor_map_decode import TensorMap

CHECK = "scaled-mma"
SCALE_BLOCK_BYTES = 512  # 128 rows x 4 scales, rows of 16 bytes (PTX ISA, scale factor layouts)
_SCALE_COPY_SHAPE = "32x128b.warpx4"
_OPERANDS = ("A", "B")
# Element types of tensor maps that leave in shared memory what the MMA kind reads: packed nibbles
# for the FP4 kinds, 16 elements in 16 bytes for mxf8f6f4 (PTX ISA, "Packing formats").
_TMA_ELEMENTS = {
    ("mxf4nvf4", "e2m1"): ("b4x16", "u8"),
    ("mxf4", "e2m1"): ("b4x16", "u8"),
    ("mxf8f6f4", "e2m1"): ("b4x16_p64",),
    ("mxf8f6f4", "e4m3"): ("u8",),
    ("mxf8f6f4", "e5m2"): ("u8",),
    ("mxf8f6f4", "e2m3"): ("b6x16_p32",),
    ("mxf8f6f4", "e3m2"): ("b6x16_p32",),
}
_BIT_23 = {
    "e8m0": "instruction descriptor bit 23 is 1, scales are read as E8M0 (UE8M0); E4M3 (bit 23 = 0)"
    " is wanted. ptxas accepts both: the scale byte 0x38, 1.0 in E4M3, would mean 2^-71",
    "e4m3": "instruction descriptor bit 23 is 0, scales are read as E4M3 (UE4M3); E8M0 (bit 23 = 1)"
    " is wanted. ptxas accepts both: the scale byte 0x7f, 1.0 in E8M0, is NaN in E4M3",
}


@dataclass(frozen=True, slots=True)
class ScaledMmaExpectation:
    """What the block-scaled MMAs of a kernel should be.

    Attributes:
        scale_dtype: "e4m3" or "e8m0".
        kind: "mxf4nvf4", "mxf4" or "mxf8f6f4".
        block: elements along K that share a scale: 16 or 32.
        shape: M, N, K of one instruction; M of both CTAs together.
        element: "e2m1" and so on, of A and of B.
    """

    scale_dtype: str
    kind: str
    block: int
    shape: tuple[int, int, int]
    element: str = "e2m1"

    def __post_init__(self) -> None:
        """Raise UsageError for what no block-scaled MMA can be."""
        if self.scale_dtype not in _BIT_23:
            raise UsageError(f"scale_dtype is {self.scale_dtype!r}; 'e4m3' or 'e8m0' is wanted")
        if (self.kind, self.element) not in _TMA_ELEMENTS:
            known = ", ".join(f"{kind} of {element}" for kind, element in _TMA_ELEMENTS)
            raise UsageError(f"no MMA is {self.kind} of {self.element}; there are {known}")
        if self.block not in (16, 32):
            raise UsageError(f"block is {self.block}; 16 or 32 is wanted")


def check_scaled_mma_facts(
    kernel: KernelText,
    expectation: ScaledMmaExpectation,
    parameters: Sequence[bytes] | None = None,
) -> CheckReport:
    """Return the four facts of every block-scaled MMA, and where they are not as expected.

    Args:
        kernel: the kernel.
        expectation: what is meant.
        parameters: bytes of each kernel parameter of a launch, e.g. of the virtual GPU's log; what
            depends on tensor maps is undecided without them.
    """
    values = find_first_pass(kernel, parameters)
    products = list_scaled_mma(values, parameters)
    if not products:
        message = f"the kernel has no block-scaled MMA; kind::{expectation.kind} is wanted"
        finding = CheckFinding(f"{CHECK}/kind", Severity.ERROR, kernel.short_name, message)
        return CheckReport(CHECK, (finding,))
    check = _Check(values, expectation)
    found = [finding for product in products for finding in check.list_findings(product)]
    evidence = _list_evidence(values, products[0])
    return CheckReport(CHECK, _merge(found), tuple(evidence), len(products))


def list_scaled_mma_facts(
    kernel: KernelText, parameters: Sequence[bytes] | None = None
) -> tuple[Evidence, ...]:
    """Return the four facts of a kernel's first block-scaled MMA, () where it has none."""
    values = find_first_pass(kernel, parameters)
    products = list_scaled_mma(values, parameters)
    return tuple(_list_evidence(values, products[0])) if products else ()


def _merge(findings: Sequence[CheckFinding]) -> tuple[CheckFinding, ...]:
    """Return one finding per rule and message: unrolled MMAs share what is wrong with them."""
    first: dict[tuple[str, str], CheckFinding] = {}
    for finding in findings:
        first.setdefault((finding.rule, finding.message), finding)
    return tuple(first.values())


@dataclass(frozen=True)
class _Check:
    values: RegisterValues
    wanted: ScaledMmaExpectation

    def list_findings(self, product: ScaledMma) -> Iterator[CheckFinding]:
        """Yield what is wrong or undecided about one MMA."""
        yield from self._check_scale_dtype(product)
        yield from self._check_form(product)
        for name, loads in zip(_OPERANDS, product.loads, strict=True):
            yield from self._check_tma_element(product, name, loads)
        for name, source in zip(_OPERANDS, product.scales, strict=True):
            yield from self._check_scale_path(product, name, source)

    def _make(
        self, product: ScaledMma, rule: str, message: str, severity: Severity = Severity.ERROR
    ) -> CheckFinding:
        place = self.values.kernel.describe(product.index)
        return CheckFinding(f"{CHECK}/{rule}", severity, place, message)

    def _check_scale_dtype(self, product: ScaledMma) -> Iterator[CheckFinding]:
        found = product.form.scale_dtype
        if found is None:
            message = (
                "bit 23 of the instruction descriptor (scales E4M3 or E8M0) cannot be traced to "
                f"constants: known bits are 0x{product.descriptor.mask:08x}"
            )
            yield self._make(product, "scale-dtype", message, Severity.UNDECIDED)
        elif found != self.wanted.scale_dtype:
            yield self._make(product, "scale-dtype", _BIT_23[found])

    def _check_form(self, product: ScaledMma) -> Iterator[CheckFinding]:
        form, wanted = product.form, self.wanted
        if (form.kind, form.block) != (wanted.kind, wanted.block):
            message = (
                f"kind::{form.kind} with blocks of {form.block}; kind::{wanted.kind} with blocks "
                f"of {wanted.block} is wanted"
            )
            yield self._make(product, "kind", message)
        if None in form.shape:
            message = f"M, N, K are {form.shape} as far as the descriptor can be traced"
            yield self._make(product, "shape", message, Severity.UNDECIDED)
        elif form.shape != wanted.shape:
            yield self._make(product, "shape", f"M, N, K are {form.shape}, not {wanted.shape}")
        for name, element in zip(_OPERANDS, form.elements, strict=True):
            if element is None:
                message = f"the element type of {name} in the descriptor cannot be traced"
                yield self._make(product, "element", message, Severity.UNDECIDED)
            elif element != wanted.element:
                yield self._make(product, "element", f"{name} is {element}, not {wanted.element}")

    def _check_tma_element(
        self, product: ScaledMma, name: str, loads: Sequence[TmaLoad]
    ) -> Iterator[CheckFinding]:
        maps = [load.tensor_map for load in loads if load.tensor_map is not None]
        if not maps:
            message = f"{name}: {self._explain_no_load()}"
            yield self._make(product, "tma-element", message, Severity.UNDECIDED)
            return
        legal = _TMA_ELEMENTS[self.wanted.kind, self.wanted.element]
        if not any(tensor_map.layout.dtype in legal for tensor_map in maps):
            found = ", ".join(tensor_map.layout.dtype for tensor_map in maps)
            message = (
                f"the tensor map of {name} has element type {found}; kind::{self.wanted.kind} of "
                f"{self.wanted.element} reads what {' or '.join(legal)} leaves in shared memory"
            )
            yield self._make(product, "tma-element", message)

    def _explain_no_load(self) -> str:
        return (
            "no TMA load with a known tensor map fills its shared memory (tensor maps are "
            "known in a launch; other copies are not followed)"
        )

    def _check_scale_path(
        self, product: ScaledMma, name: str, source: ScaleSource
    ) -> Iterator[CheckFinding]:
        if source.column is None or not source.copies:
            where = "unknown columns" if source.column is None else f"column {source.column}"
            message = (
                f"scales of {name} are read from {where} of tensor memory; no tcgen05.cp was "
                "found that writes them"
            )
            yield self._make(product, "scale-layout", message, Severity.UNDECIDED)
            return
        if source.missing:
            message = (
                f"scales of {name} are read from columns {source.missing[0]} to "
                f"{source.missing[-1]} too, which no tcgen05.cp writes"
            )
            yield self._make(product, "scale-layout", message)
        for problem in _list_copy_problems(source):
            yield self._make(product, "scale-layout", f"scales of {name}: {problem}")
        maps = [load.tensor_map for load in source.loads if load.tensor_map is not None]
        if not maps:
            message = f"scales of {name}: {self._explain_no_load()}"
            yield self._make(product, "scale-layout", message, Severity.UNDECIDED)
        elif all(problems := [list(list_scale_map_problems(one)) for one in maps]):
            yield self._make(product, "scale-layout", f"scales of {name}: {problems[0][0]}")


def _list_evidence(values: RegisterValues, product: ScaledMma) -> Iterator[Evidence]:
    """Yield the facts of one MMA with what shows them."""
    kernel, form, bits = values.kernel, product.form, product.descriptor
    descriptor = f"descriptor 0x{bits.value:08x}, known bits 0x{bits.mask:08x}"
    line = f"{kernel.quote(product.index)} {descriptor}"
    if form.scale_dtype is not None:
        bit = int(form.scale_dtype == "e8m0")
        yield Evidence(f"scales are {form.scale_dtype.upper()} (bit 23 = {bit})", line)
    shape = "x".join("?" if size is None else str(size) for size in form.shape)
    yield Evidence(
        f"MMA kind::{form.kind}, blocks of {form.block}, {shape}, {form.num_ctas} CTA"
        f"{'s' if form.num_ctas > 1 else ''}, A {form.elements[0]}, B {form.elements[1]}",
        line,
    )
    for name, loads in zip(_OPERANDS, product.loads, strict=True):
        for load in loads:
            yield Evidence(f"{name} by TMA: {load.tensor_map}", _show_load(values, load))
    for name, source in zip(_OPERANDS, product.scales, strict=True):
        yield from _list_scale_evidence(values, name, source)


def _list_scale_evidence(
    values: RegisterValues, name: str, source: ScaleSource
) -> Iterator[Evidence]:
    for load in source.loads:
        yield Evidence(f"scales of {name} by TMA: {load.tensor_map}", _show_load(values, load))
    for copy in source.copies:
        at = "?" if copy.source is None else f"0x{copy.source:x}"
        first = copy.first_column
        last = "?" if first is None else first + copy.num_columns - 1
        yield Evidence(
            f"scales of {name}: shared+{at} to columns {first}-{last} by {copy.shape}",
            values.kernel.quote(copy.index),
        )


def _show_load(values: RegisterValues, load: TmaLoad) -> str:
    encoded = "" if load.encoded is None else f", bytes 0-63 {load.encoded[:64].hex(' ', 8)}"
    return f"parameter {load.parameter}{encoded}; {values.kernel.quote(load.index)}"


def _list_copy_problems(source: ScaleSource) -> Iterator[str]:
    for copy in source.copies:
        if copy.shape != _SCALE_COPY_SHAPE:
            yield f"tcgen05.cp.{copy.shape} copies them; {_SCALE_COPY_SHAPE} is wanted"
        elif copy.swizzle_code:
            yield (
                f"tcgen05.cp reads them with swizzle code {copy.swizzle_code} in its descriptor; "
                "scale blocks are not swizzled (0)"
            )
        elif copy.source is not None:
            starts = [load.first for load in source.loads if load.covers(copy.source)]
            offsets = [(copy.source - start) % SCALE_BLOCK_BYTES for start in starts if start]
            if offsets and all(offsets):
                yield (
                    f"tcgen05.cp starts {offsets[0]} bytes into a block of {SCALE_BLOCK_BYTES}: "
                    "128 rows x 4 scales"
                )


def list_scale_map_problems(tensor_map: TensorMap) -> Iterator[str]:
    """Yield why a tensor map does not bring whole scale blocks of 512 contiguous bytes."""
    box, layout = tensor_map.box, tensor_map.layout
    if box.swizzle or box.interleave:
        yield (
            f"their tensor map has swizzle {box.swizzle} and interleave {box.interleave}; "
            "scale blocks lie in shared memory as in global memory"
        )
    contiguous = tensor_map.row_bytes
    for extent, stride in zip(box.shape[1:], layout.strides or (), strict=True):
        if contiguous >= SCALE_BLOCK_BYTES or stride != contiguous:
            break
        contiguous *= extent
    if contiguous % SCALE_BLOCK_BYTES:
        yield (
            f"their tensor map brings runs of {contiguous} contiguous bytes; blocks of "
            f"{SCALE_BLOCK_BYTES} (128 rows x 4 scales) are wanted"
        )
