"""Natural loops of a control-flow graph, and an order of its blocks without their back edges."""

from dataclasses import dataclass

from halfbyte.ptx.control_flow import ControlFlow
from halfbyte.ptx.dominators import DominatorTree


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop: its header dominates `blocks`, all of which lead back to it."""

    header: int
    blocks: frozenset[int]


def find_loops(flow: ControlFlow, dominators: DominatorTree) -> tuple[Loop, ...]:
    """Return the natural loops, one per header, smallest first."""
    bodies: dict[int, set[int]] = {}
    for block, targets in enumerate(flow.successors):
        for header in targets:
            if header != flow.exit and dominators.dominates(header, block):
                bodies.setdefault(header, {header}).update(_find_body(flow, header, block))
    loops = (Loop(header, frozenset(blocks)) for header, blocks in bodies.items())
    return tuple(sorted(loops, key=lambda loop: (len(loop.blocks), loop.header)))


def _find_body(flow: ControlFlow, header: int, last: int) -> set[int]:
    found = {header, last}
    waiting = [last] if last != header else []
    while waiting:
        for previous in flow.predecessors[waiting.pop()]:
            if previous not in found:
                found.add(previous)
                waiting.append(previous)
    return found


def order_blocks(flow: ControlFlow) -> tuple[int, ...]:
    """Return the reachable blocks so that only edges back into a loop go backwards."""
    seen = {0}
    order: list[int] = []
    stack = [(0, iter(flow.successors[0]))]
    while stack:
        block, following = stack[-1]
        for target in following:
            if target != flow.exit and target not in seen:
                seen.add(target)
                stack.append((target, iter(flow.successors[target])))
                break
        else:
            order.append(block)
            stack.pop()
    return tuple(reversed(order))
