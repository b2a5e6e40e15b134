"""Runs one case under a profiler: `python -m halfbyte.bench.speed.profiled_case` and its words.

The check and the warm-up lie outside the profiled range, one call inside it.
"""

import sys
from typing import Any


def main(words: list[str]) -> None:
    """Run `kind case shape dtype seed`."""
    import torch

    from halfbyte.bench.speed.plan import DTYPES, list_cases, parse_request
    from halfbyte.bench.speed.problem import make_problem
    from halfbyte.bench.speed.trial import check_trial
    from halfbyte.runtime.targets import read_device_target

    kind, case, shape, dtype, seed = words
    request = parse_request([kind], shape, None, None, dtype)
    make = list_cases(request, kind, read_device_target())[case]
    place = torch.device("cuda", torch.cuda.current_device())
    problem = make_problem(request.shapes[0], DTYPES[dtype], place, int(seed))
    trial = make(problem)
    check_trial(trial)
    launch = trial.bind(trial.operands, trial.outputs)
    launch()
    torch.cuda.synchronize()
    profiler: Any = torch.cuda.profiler
    profiler.start()
    launch()
    torch.cuda.synchronize()
    profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
