"""f32, f32x2 and mixed-precision arithmetic (PTX ISA, "Floating Point Instructions").

Handlers name the rounding always (`add.rn.f32` for `add.f32`) and in the order rounding, .ftz,
.sat. Attribute of testp: the property's position in TESTP_PROPERTIES.
"""

from collections.abc import Iterator

from halfbyte.ptx.instruction_form import InstructionForm

FAMILY = "float32"

ROUNDINGS = ("rn", "rz", "rm", "rp")
TESTP_PROPERTIES = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")


def join_words(*words: str) -> str:
    """Return the words that are not empty with dots between them."""
    return ".".join(word for word in words if word)


def _make(name: str, sources: int, handler: str, width: str = "b32") -> InstructionForm:
    return InstructionForm(name, FAMILY, f"={width}" + f" {width}" * sources, handler)


def _list_rounded() -> Iterator[InstructionForm]:
    """Yield add, sub, mul, fma, mad of f32 and f32x2, div, rcp and sqrt with a rounding."""
    for flush in ("", "ftz"):
        for rounding in ("", *ROUNDINGS):
            full = rounding or "rn"
            for saturate in ("", "sat"):
                for stem, sources in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3), ("mad", 3)):
                    if stem in ("fma", "mad") and not rounding:
                        continue
                    name = join_words(stem, rounding, flush, saturate, "f32")
                    core = "fma" if stem == "mad" else stem
                    yield _make(name, sources, join_words(core, full, flush, saturate, "f32"))
            for stem, sources in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
                if stem == "fma" and not rounding:
                    continue
                name = join_words(stem, rounding, flush, "f32x2")
                yield _make(name, sources, join_words(stem, full, flush, "f32x2"), "b64")
            if rounding:
                for stem, sources in (("div", 2), ("rcp", 1), ("sqrt", 1)):
                    name = join_words(stem, rounding, flush, "f32")
                    yield _make(name, sources, name)


def _list_approximate() -> Iterator[InstructionForm]:
    for flush in ("", "ftz"):
        for stem in ("div.full", "div.approx"):
            name = join_words(stem, flush, "f32")
            yield _make(name, 2, name)
        for stem in ("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2"):
            name = join_words(stem, "approx", flush, "f32")
            yield _make(name, 1, name)
    yield _make("tanh.approx.f32", 1, "tanh.approx.f32")


def _list_extremes() -> Iterator[InstructionForm]:
    for stem in ("min", "max"):
        for flush in ("", "ftz"):
            for nan in ("", "NaN"):
                name = join_words(stem, flush, nan, "f32")
                three = join_words(f"{stem}3", flush, nan, "f32")
                yield InstructionForm(
                    name,
                    FAMILY,
                    "=b32 b32 b32",
                    name,
                    alternatives=(InstructionForm(name, FAMILY, "=b32 b32 b32 b32", three),),
                )
                name = join_words(stem, flush, nan, "xorsign.abs.f32")
                yield _make(name, 2, name)
                name = join_words(stem, flush, nan, "abs.f32")
                yield _make(name, 3, join_words(f"{stem}3", flush, nan, "abs.f32"))


def _list_signs() -> Iterator[InstructionForm]:
    for stem in ("abs", "neg"):
        for flush in ("", "ftz"):
            name = join_words(stem, flush, "f32")
            yield _make(name, 1, name)
    yield _make("copysign.f32", 2, "copysign.f32")
    for kind, width in (("f32", "b32"), ("f64", "b64")):
        for number, word in enumerate(TESTP_PROPERTIES):
            yield InstructionForm(
                f"testp.{word}.{kind}", FAMILY, f"=pred {width}", f"testp.{kind}", (number,)
            )


def _list_mixed() -> Iterator[InstructionForm]:
    for kind in ("f16", "bf16"):
        for rounding in ("", *ROUNDINGS):
            for saturate in ("", "sat"):
                for stem in ("add", "sub", "fma"):
                    if stem == "fma" and not rounding:
                        continue
                    sources = "b16 b16 b32" if stem == "fma" else "b16 b32"
                    yield InstructionForm(
                        join_words(stem, rounding, saturate, "f32", kind),
                        FAMILY,
                        f"=b32 {sources}",
                        join_words(stem, rounding or "rn", saturate, "f32", kind),
                    )


FORMS = (
    *_list_rounded(),
    *_list_approximate(),
    *_list_extremes(),
    *_list_signs(),
    *_list_mixed(),
)
