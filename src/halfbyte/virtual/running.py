"""The compiled core at work: a program handed over once, launches run to their end."""

import ctypes
import json
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from halfbyte.arch import Gpu
from halfbyte.errors import UsageError
from halfbyte.virtual.library import (
    ConstantRecord,
    LaunchConfig,
    PollCallback,
    PrintCallback,
    ProgramSizes,
    load_core,
    take_text,
)
from halfbyte.virtual.lowering import Program
from halfbyte.virtual.occupancy import count_ctas_per_sm, count_resident_clusters
from halfbyte.virtual.report import LaunchReport, read_result

if TYPE_CHECKING:
    from halfbyte.virtual.device import Device
    from halfbyte.virtual.launch_options import LaunchOptions
    from halfbyte.virtual.launch_shape import LaunchShape


class LoadedProgram:
    """A program and its copy inside the core."""

    def __init__(self, program: Program) -> None:
        """Hand the arrays over. Raises UsageError where the core lacks a routine they name."""
        core = load_core()
        self.program = program
        sizes = ProgramSizes(
            len(program.instructions),
            program.operands.size,
            program.attributes.size,
            len(program.constants),
            program.register_slots,
            program.num_predicates,
            program.static_shared_end,
            program.local_bytes,
        )
        records = [ConstantRecord(low, high, words) for low, high, words in program.constants]
        constants = (ConstantRecord * len(records))(*records)
        missing = ctypes.c_void_p()
        pointer = core.hb_program_create(
            ctypes.byref(sizes),
            np.ascontiguousarray(program.instructions).ctypes.data,
            program.operands.ctypes.data,
            program.attributes.ctypes.data,
            constants,
            "\n".join(program.handlers).encode(),
            ctypes.byref(missing),
        )
        if not pointer:
            names = take_text(core, missing.value or 0).split()
            raise UsageError(
                f"{program.name}: the core of the virtual GPU lacks {', '.join(names)}: "
                "rebuild halfbyte"
            )
        self.pointer: int = pointer
        self._finalizer = weakref.finalize(self, core.hb_program_destroy, pointer)


def run_launch(
    device: "Device",
    loaded: LoadedProgram,
    shape: "LaunchShape",
    parameters: bytes,
    options: "LaunchOptions",
) -> LaunchReport:
    """Return the report of one launch whose sizes were checked.

    Raises KernelFault, Deadlock or Livelock where the kernel does not end as it should, and what a
    signal handler (Ctrl-C) or `print_text` raises meanwhile: the launch ends there.
    """
    core = load_core()
    # An exception cannot pass through the core: it is kept, ends the launch, and is raised then.
    errors: list[BaseException] = []
    polls = _answer_polls(errors)
    next(polls)
    config = _make_config(device.gpu, loaded.program, shape, parameters, options)
    config.print = _make_print_callback(options.print_text or sys.stdout.write, errors)
    config.poll = PollCallback(polls.__next__)
    start = time.perf_counter()
    pointer = core.hb_launch(loaded.pointer, device.memory.pointer, ctypes.byref(config))
    seconds = time.perf_counter() - start
    text = take_text(core, pointer)
    if errors:
        raise errors[0]
    return read_result(loaded.program, shape, json.loads(text), seconds)


def _make_print_callback(write: Callable[[str], object], errors: list[BaseException]) -> Any:
    def print_bytes(text: "ctypes._Pointer[ctypes.c_char]", nbytes: int) -> None:
        if errors:
            return
        try:
            write(ctypes.string_at(text, nbytes).decode("utf-8", "replace"))
        except BaseException as error:
            errors.append(error)

    return PrintCallback(print_bytes)


def _answer_polls(errors: list[BaseException]) -> Iterator[int]:
    """Yield 1 once there is an error.

    Signal handlers run when Python's code does: here. A function would raise what a handler raises
    (KeyboardInterrupt) before its first line; a generator is inside its `try` by then.
    """
    while True:
        try:
            yield int(bool(errors))
        except GeneratorExit:
            return
        except BaseException as error:
            errors.append(error)


def _make_config(
    gpu: Gpu,
    program: Program,
    shape: "LaunchShape",
    parameters: bytes,
    options: "LaunchOptions",
) -> LaunchConfig:
    return LaunchConfig(
        grid=shape.grid,
        block=shape.block,
        cluster=shape.cluster,
        dynamic_shared_bytes=shape.dynamic_shared,
        max_resident_clusters=max(1, count_resident(gpu, program, shape)),
        num_sms=gpu.num_sms,
        parameters=parameters,
        parameter_bytes=len(parameters),
        adversarial_try_wait=options.adversarial_try_wait,
        livelock_instructions=options.livelock_instructions,
        max_instructions=options.max_instructions,
        num_threads=options.num_threads,
        shared_poison=options.shared_poison,
        latency_seed=options.latency_seed,
        reverse_warps=options.reverse_warps,
        reserved_shared_bytes=gpu.reserved_shared_bytes,
        max_warps_per_sm=gpu.max_warps_per_sm,
        tensor_memory_columns=gpu.tensor_memory_columns,
        compute_capability=gpu.number,
        clock_hz=gpu.clock,
    )


def count_resident(gpu: Gpu, program: Program, shape: "LaunchShape") -> int:
    """Return how many clusters of a launch run at once."""
    shared = program.static_shared_end - gpu.reserved_shared_bytes + shape.dynamic_shared
    ctas_per_sm = max(1, count_ctas_per_sm(gpu, shape.threads, shared))
    return count_resident_clusters(gpu, math.prod(shape.cluster), ctas_per_sm)
