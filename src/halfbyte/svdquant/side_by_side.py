"""Independent pieces of work at the same time, each with its share of torch's threads.

Many small matrix operations scale badly over threads: each ends in a barrier, and on a busy
machine the barrier waits for whichever thread the system took away. Whole pieces side by side
meet once, at their end.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def run_side_by_side(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Return the results of `tasks` in their order; the first error of a task is raised.

    Each task runs under no_grad in a thread of its own, or in turn where torch has one thread.
    Its share of threads, and with it its arithmetic, depends on torch's number alone.
    """
    total = torch.get_num_threads()
    share = max(1, total // max(len(tasks), 1))
    if total == 1 or len(tasks) < 2:
        return [_run_with(share, task) for task in tasks]
    try:
        with ThreadPoolExecutor(len(tasks)) as pool:
            futures = [pool.submit(_run_with, share, task) for task in tasks]
            return [future.result() for future in futures]
    finally:
        torch.set_num_threads(total)  # the number that new threads start from is the process's


def _run_with(threads: int, task: Callable[[], Result]) -> Result:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            return task()
    finally:
        torch.set_num_threads(before)
