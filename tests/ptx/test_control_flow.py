"""Basic blocks, their edges, and who dominates whom."""

import pytest
from hypothesis import given, settings

from halfbyte.errors import PtxError
from halfbyte.ptx.control_flow import ControlFlow
from halfbyte.ptx.dominators import NONE, find_dominators, find_post_dominators
from tests.ptx.random_flow import draw_body, make_flow

DIAMOND = "@%p1 bra ELSE; add; bra JOIN; ELSE: sub; JOIN: mul; ret;"


def test_a_diamond_has_four_blocks() -> None:
    flow = make_flow(DIAMOND)
    assert flow.starts == (0, 1, 3, 4, 6)
    assert flow.successors == ((2, 1), (3,), (3,), (4,))
    assert flow.predecessors == ((), (0,), (0,), (1, 2), (3,))
    assert (flow.num_blocks, flow.exit) == (4, 4)
    assert flow.labels == {"ELSE": 3, "JOIN": 4}
    assert flow.list_blocks() == [0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("body", "successors"),
    [
        ("", ()),
        ("add;", ((1,),)),
        ("ret;", ((1,),)),
        ("@%p1 ret; add;", ((2, 1), (2,))),
        ("@%p1 exit; add;", ((2, 1), (2,))),
        ("trap; add;", ((2,), (2,))),
        ("call.uni f; add;", ((1,),)),
        ("L: bra L;", ((0,),)),
        ("@%p1 bra L; L: add;", ((1,), (2,))),
        ("@!%p1 bra.uni L; add; L:", ((2, 1), (2,))),
        ("bra L; L:", ((1,),)),
        ("t: .branchtargets A, B, A; brx.idx %r1, t; A: add; B: ret;", ((1, 2), (2,), (3,))),
        ("t: .branchtargets A; @%p1 brx.idx %r1, t; add; A:", ((2, 1), (2,))),
    ],
)
def test_edges_follow_the_last_instruction(body: str, successors: tuple[object, ...]) -> None:
    assert make_flow(body).successors == successors


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bra NOWHERE;", "line 7: 'NOWHERE' is no label of k: bra NOWHERE;"),
        ("brx.idx %r1, t;", "'t' is no table of `.branchtargets`"),
        ("brx.idx %r1;", "a branch needs a label"),
        ("bra %r1;", "a branch needs a label"),
        ("t: .branchtargets A; brx.idx %r1, t;", "'A' is no label of k"),
    ],
)
def test_a_branch_to_nowhere_is_refused(body: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        make_flow(body)


def test_the_branch_of_a_diamond_is_rejoined_behind_it() -> None:
    flow = make_flow(DIAMOND)
    dominators = find_dominators(flow)
    assert dominators.immediate == (NONE, 0, 0, 0, 3)
    assert dominators.find_nearest(1, 2) == 0
    post = find_post_dominators(flow)
    assert post.immediate == (3, 3, 3, 4, NONE)
    assert post.dominates(3, 0)
    assert not post.dominates(1, 0)


def test_a_loop_without_end_still_has_post_dominators() -> None:
    post = find_post_dominators(make_flow("add; L: sub; bra L; mul;"))
    assert post.immediate == (1, 3, 3, NONE)


def test_unreachable_blocks_are_dominated_by_nobody() -> None:
    tree = find_dominators(make_flow("bra END; add; END: ret;"))
    assert tree.immediate[1] == NONE
    assert tree.depths[1] == -1
    assert not tree.dominates(0, 1)
    assert tree.find_nearest(1, 2) == NONE


def list_reached(flow: ControlFlow, start: int, without: int) -> set[int]:
    """Return the nodes that `start` reaches on paths that avoid `without`."""
    reached = {start} - {without}
    stack = list(reached)
    while stack:
        node = stack.pop()
        for target in flow.successors[node] if node < flow.num_blocks else ():
            if target != without and target not in reached:
                reached.add(target)
                stack.append(target)
    return reached


@given(draw_body())
@settings(max_examples=80, deadline=None)
def test_dominators_are_what_removing_a_node_shows(body: str) -> None:
    flow = make_flow(body)
    tree = find_dominators(flow)
    reachable = list_reached(flow, 0, NONE)
    for node in range(flow.exit + 1):
        assert (tree.depths[node] >= 0) == (node in reachable)
        for other in reachable:
            cuts = other == node or (node in reachable and other not in list_reached(flow, 0, node))
            assert tree.dominates(node, other) == cuts


@given(draw_body())
@settings(max_examples=80, deadline=None)
def test_post_dominators_are_what_removing_a_node_shows(body: str) -> None:
    flow = make_flow(body)
    tree = find_post_dominators(flow)
    blocks = range(flow.num_blocks)
    leaving = [block for block in blocks if flow.exit in list_reached(flow, block, NONE)]
    assert all(tree.depths[block] > 0 for block in blocks)
    if len(leaving) < flow.num_blocks:
        return  # an endless loop gets an edge of its own
    for node in blocks:
        for other in blocks:
            cuts = other == node or flow.exit not in list_reached(flow, other, node)
            assert tree.dominates(node, other) == cuts
