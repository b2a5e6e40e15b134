"""Dominators and post-dominators of a control-flow graph.

The algorithm is the iteration over immediate dominators in reverse post-order of Cooper, Harvey
and Kennedy ("A Simple, Fast Dominance Algorithm", 2001).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.ptx.control_flow import ControlFlow

NONE = -1  # no immediate dominator: the root, or a node that the root does not reach


@dataclass(frozen=True, slots=True)
class DominatorTree:
    """Immediate dominators of the nodes of a graph (blocks and `exit`).

    `depths` counts the steps to the root; -1 for a node that is not in the tree.
    """

    root: int
    immediate: tuple[int, ...]
    depths: tuple[int, ...]

    def dominates(self, first: int, second: int) -> bool:
        """Return whether every path from the root to `second` goes through `first`.

        A node dominates itself; nodes outside the tree neither dominate nor are dominated.
        """
        if self.depths[first] < 0:
            return False
        while self.depths[second] > self.depths[first]:
            second = self.immediate[second]
        return first == second

    def find_nearest(self, first: int, second: int) -> int:
        """Return the nearest node that dominates both; NONE if one is not in the tree."""
        if self.depths[first] < 0 or self.depths[second] < 0:
            return NONE
        while first != second:
            if self.depths[first] < self.depths[second]:
                second = self.immediate[second]
            else:
                first = self.immediate[first]
        return first


def find_dominators(flow: ControlFlow) -> DominatorTree:
    """Return the dominator tree, rooted in block 0. Blocks nobody reaches are not in it."""
    successors = [*flow.successors, ()]
    return _make_tree(0, successors, flow.predecessors)


def find_post_dominators(flow: ControlFlow) -> DominatorTree:
    """Return the post-dominator tree, rooted in `exit`.

    A loop without a way out gets one, from its last block in the text, so that every block has an
    immediate post-dominator.
    """
    predecessors = [list(blocks) for blocks in flow.predecessors]
    successors = [list(blocks) for blocks in (*flow.successors, ())]
    reached = set(_list_post_order(flow.exit, predecessors))
    for block in reversed(range(flow.num_blocks)):
        if block not in reached:
            predecessors[flow.exit].append(block)
            successors[block].append(flow.exit)
            reached.update(_list_post_order(block, predecessors, reached))
    return _make_tree(flow.exit, predecessors, successors)


def _list_post_order(
    root: int, successors: Sequence[Sequence[int]], known: set[int] | None = None
) -> list[int]:
    seen = {root} | (known or set())
    order: list[int] = []
    stack = [(root, iter(successors[root]))]
    while stack:
        node, following = stack[-1]
        for target in following:
            if target not in seen:
                seen.add(target)
                stack.append((target, iter(successors[target])))
                break
        else:
            order.append(node)
            stack.pop()
    return order


def _make_tree(
    root: int, successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]]
) -> DominatorTree:
    post_order = _list_post_order(root, successors)
    number = dict(zip(post_order, range(len(post_order)), strict=True))
    immediate = [NONE] * len(successors)
    immediate[root] = root
    changed = True
    while changed:
        changed = False
        for node in reversed(post_order[:-1]):
            chosen = NONE
            for previous in predecessors[node]:
                if immediate[previous] == NONE:
                    continue
                chosen = previous if chosen == NONE else _meet(chosen, previous, immediate, number)
            if immediate[node] != chosen:
                immediate[node] = chosen
                changed = True
    immediate[root] = NONE
    depths = [-1] * len(successors)
    depths[root] = 0
    for node in reversed(post_order[:-1]):
        depths[node] = depths[immediate[node]] + 1
    return DominatorTree(root, tuple(immediate), tuple(depths))


def _meet(first: int, second: int, immediate: list[int], number: dict[int, int]) -> int:
    while first != second:
        if number[first] < number[second]:
            first = immediate[first]
        else:
            second = immediate[second]
    return first
