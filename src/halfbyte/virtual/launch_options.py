"""How the virtual GPU runs a launch."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from halfbyte.errors import UsageError
from halfbyte.virtual.plain_values import read_integer, show

MAX_THREADS = 1024
_LIMITS = {  # smallest and largest value
    "latency_seed": (0, 2**32 - 1),
    "livelock_instructions": (1, 2**63 - 1),
    "max_instructions": (0, 2**63 - 1),
    "num_threads": (1, MAX_THREADS),
    "shared_poison": (0, 255),
}


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How the virtual GPU runs a launch; the defaults suit programs, the rest suits tests.

    Attributes:
        adversarial_try_wait: the first failing `mbarrier.try_wait` of a wait returns false at once,
            as the PTX ISA allows, instead of suspending: code that never tests its result is found.
        latency_seed: 0 for fixed latencies, else asynchronous work takes 0.2x to 2.2x as long.
        reverse_warps: later warps go first where the clock does not decide.
        livelock_instructions: instructions of the launch without any progress (stores, barriers,
            completions, exits) after which it is looked at: a livelock where every thread comes
            back to a state that it was in before; 40 times as many end it in any case.
        max_instructions: 0, or the most instructions a launch may take.
        num_threads: host threads for tensor core arithmetic; results do not depend on it.
        shared_poison: byte that fresh shared memory holds.
        print_text: receives what kernels print; None is standard output.

    Raises UsageError for a value out of its range or of another type.
    """

    adversarial_try_wait: bool = False
    latency_seed: int = 0
    reverse_warps: bool = False
    livelock_instructions: int = 50_000_000
    max_instructions: int = 0
    num_threads: int = min(os.cpu_count() or 1, 8)
    shared_poison: int = 0xAB
    print_text: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        for name, (low, high) in _LIMITS.items():
            value = read_integer(getattr(self, name), f"LaunchOptions.{name}")
            if not low <= value <= high:
                raise UsageError(f"LaunchOptions.{name} is {value}; {low} to {high} is wanted")
            object.__setattr__(self, name, value)
        for name in ("adversarial_try_wait", "reverse_warps"):
            if not isinstance(getattr(self, name), bool):
                given = show(getattr(self, name))
                raise UsageError(f"LaunchOptions.{name} is {given}; True or False is wanted")
        if self.print_text is not None and not callable(self.print_text):
            raise UsageError(
                f"LaunchOptions.print_text is {show(self.print_text)}; a function of one text "
                "or None is wanted"
            )
