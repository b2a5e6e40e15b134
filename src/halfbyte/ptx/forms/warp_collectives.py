"""Lanes of a warp together: shfl, vote, match, redux, activemask.

(PTX ISA, "Data Movement" and "Parallel Synchronization and Communication Instructions".)
Attributes of redux.sync on f32: maximum, .abs, .NaN.
"""

from collections.abc import Iterator

from halfbyte.ptx.forms.float32 import join_words
from halfbyte.ptx.instruction_form import InstructionForm

FAMILY = "warp_collectives"


def _make_sync(
    name: str, operands: str, handler: str, attributes: tuple[int, ...] = ()
) -> InstructionForm:
    return InstructionForm(name, FAMILY, operands, handler, attributes, convergence="membermask")


def _list_shuffles_and_votes() -> Iterator[InstructionForm]:
    for mode in ("up", "down", "bfly", "idx"):
        yield _make_sync(f"shfl.sync.{mode}.b32", "=b32|pred b32 b32 b32 b32", f"shfl.{mode}")
        yield InstructionForm(f"shfl.{mode}.b32", FAMILY, "=b32|pred b32 b32 b32", f"shfl.{mode}")
    for mode in ("all", "any", "uni"):
        yield _make_sync(f"vote.sync.{mode}.pred", "=pred pred b32", f"vote.{mode}")
        yield InstructionForm(f"vote.{mode}.pred", FAMILY, "=pred pred", f"vote.{mode}")
    yield _make_sync("vote.sync.ballot.b32", "=b32 pred b32", "vote.ballot")
    yield InstructionForm("vote.ballot.b32", FAMILY, "=b32 pred", "vote.ballot")


def _list_reductions() -> Iterator[InstructionForm]:
    for width in ("b32", "b64"):
        yield _make_sync(f"match.any.sync.{width}", f"=b32 {width} b32", f"match.any.{width}")
        yield _make_sync(f"match.all.sync.{width}", f"=b32|pred {width} b32", f"match.all.{width}")
    for kind in ("u32", "s32"):
        yield _make_sync(f"redux.sync.add.{kind}", "=b32 b32 b32", "redux.add")
        for stem in ("min", "max"):
            yield _make_sync(f"redux.sync.{stem}.{kind}", "=b32 b32 b32", f"redux.{stem}.{kind}")
    for stem in ("and", "or", "xor"):
        yield _make_sync(f"redux.sync.{stem}.b32", "=b32 b32 b32", f"redux.{stem}")
    for is_max, stem in enumerate(("min", "max")):
        for takes_abs in ("", "abs"):
            for nan in ("", "NaN"):
                name = join_words("redux.sync", stem, takes_abs, nan, "f32")
                attributes = (is_max, int(bool(takes_abs)), int(bool(nan)))
                yield _make_sync(name, "=b32 b32 b32", "redux.f32", attributes)


FORMS = (
    *_list_shuffles_and_votes(),
    *_list_reductions(),
    InstructionForm("activemask.b32", FAMILY, "=b32", "activemask"),
)
