"""What `torch.cuda` answers on the virtual device, as a table of replacements."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from halfbyte.arch import Gpu
from halfbyte.virtual.driver.runtime import VirtualRuntime
from halfbyte.virtual.driver.torch_cuda.streams import (
    DEFAULT_STREAM,
    Stream,
    StreamContext,
    make_classes,
)

_IGNORED = (
    "init",
    "_lazy_init",
    "_lazy_call",
    "set_device",
    "synchronize",
    "set_stream",
    "empty_cache",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "set_per_process_memory_fraction",
    "_sleep",
)
_ZERO = (
    "current_device",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "utilization",
    "initial_seed",
)


def make_properties(gpu: Gpu) -> SimpleNamespace:
    """Return what torch.cuda.get_device_properties returns."""
    return SimpleNamespace(
        name=gpu.device_name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.num_sms,
        warp_size=gpu.warp_size,
        max_threads_per_block=gpu.max_threads_per_cta,
        max_threads_per_multi_processor=gpu.max_warps_per_sm * gpu.warp_size,
        regs_per_multiprocessor=gpu.registers_per_sm,
        shared_memory_per_block=gpu.default_shared_bytes_per_cta,
        shared_memory_per_block_optin=gpu.shared_bytes_per_cta,
        shared_memory_per_multiprocessor=gpu.shared_bytes_per_sm,
        L2_cache_size=gpu.l2_bytes,
        clock_rate=int(gpu.clock / 1000),
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName=gpu.device_name,
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
        uuid="00000000-0000-0000-0000-000000000000",
    )


def make_namespace(runtime: VirtualRuntime) -> dict[str, Any]:
    """Return the replacements of torch.cuda's attributes by name."""
    gpu = runtime.gpu
    properties = make_properties(gpu)

    def use_stream(stream: Any) -> None:
        Stream.current = stream if stream is not None else Stream.current

    table: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: gpu.device_name,
        "get_device_capability": lambda device=None: (gpu.capability[0], gpu.capability[1]),
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [gpu.target],
        "can_device_access_peer": lambda *_: False,
        "mem_get_info": lambda device=None: (gpu.memory_bytes, gpu.memory_bytes),
        "memory_stats": lambda device=None: {},
        "memory_summary": lambda *_, **__: "",
        "Stream": Stream,
        "ExternalStream": lambda stream_ptr, device=None, **_: Stream(stream_ptr=stream_ptr),
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": lambda device=None: Stream.current,
        "default_stream": lambda device=None: DEFAULT_STREAM,
        "device": lambda device=None: contextlib.nullcontext(),
        "device_of": lambda value=None: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: runtime.recording is not None,
        "graph_pool_handle": lambda: (0, 0),
        "make_graphed_callables": lambda callables, *_, **__: callables,
        "cudart": lambda: _make_cudart(),
        **make_classes(runtime),
    }
    # One function object each: torch._dynamo refuses an object that it finds under two names.
    table |= {name: lambda *_, **__: None for name in _IGNORED}
    table |= {name: lambda *_, **__: 0 for name in _ZERO}
    table["set_stream"] = use_stream
    return table


def make_raw_functions() -> dict[str, Callable[..., Any]]:
    """Return functions of torch._C that programs call directly and that a CPU build lacks."""
    return {
        "_cuda_getCurrentRawStream": lambda device=0: Stream.current.cuda_stream,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda device: None,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_synchronize": lambda: None,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }


def make_nvtx() -> dict[str, Callable[..., Any]]:
    """Return the replacements for torch.cuda.nvtx."""
    return {
        "range_push": lambda message: 0,
        "range_pop": lambda: 0,
        "range_start": lambda message: 0,
        "range_end": lambda handle: None,
        "mark": lambda message: None,
        "range": lambda *_, **__: contextlib.nullcontext(),
    }


def _make_cudart() -> SimpleNamespace:
    return SimpleNamespace(
        cudaProfilerStart=_zero,
        cudaProfilerStop=_zero,
        cudaMemGetInfo=lambda device=0: (0, 0),
        cudaHostRegister=_zero,
        cudaHostUnregister=_zero,
    )


def _zero(*_: Any, **__: Any) -> int:
    return 0
