"""Which kernels a call consists of: their names, in order, as torch's profiler saw them."""

import re

from halfbyte.bench.speed.timing_device import Launch

_LONGEST_NAME = 96


def list_operations(launch: Launch) -> tuple[str, ...]:
    """Return the GPU operations of one call, in the order they started; run apart from timing."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    launch()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        launch()
        torch.cuda.synchronize()
    events = profiler.events() or []
    on_device = [event for event in events if str(event.device_type).endswith("CUDA")]
    on_device.sort(key=lambda event: event.time_range.start)
    return tuple(shorten_name(str(event.name)) for event in on_device)


def shorten_name(name: str) -> str:
    """Return a kernel's name without return type, template arguments and parameters."""
    short = re.sub(r"^void ", "", name)
    depth, kept = 0, []
    for character in short:
        depth += character == "<"
        if depth == 0:
            kept.append(character)
        depth -= character == ">"
    short = "".join(kept).partition("(")[0].strip() or name
    return short[:_LONGEST_NAME]
