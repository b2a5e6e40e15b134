"""Run exported conformance programs on a GPU through the CUDA driver alone.

    python silicon_runner.py DIRECTORY RESULT_DIRECTORY

Needs `libcuda.so.1` and NumPy, nothing of this repository. Every program runs twice, in a worker
process that is replaced when a program faults or hangs. Writes `results.npz` (outputs, and tensor
maps as the driver encoded them) and `status.json` (what each program did, GPU, driver).
"""

import ctypes
import datetime
import io
import json
import os
import pathlib
import select
import subprocess
import sys
import threading
import time
import zipfile

import numpy as np

SECONDS_PER_PROGRAM = 12
TOTAL_SECONDS = 150  # of all programs together
WORKERS = 6
DTYPES = [
    "uint8",
    "uint16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float32_ftz",
    "tfloat32",
    "tfloat32_ftz",
]  # CUtensorMapDataType
INTERLEAVES = ("none", "16b", "32b")
SWIZZLES = ("none", "32b", "64b", "128b")
FILLS = ("none", "nan")
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
INFO_LOG, INFO_BYTES, ERROR_LOG, ERROR_BYTES = 3, 4, 5, 6  # CUjit_option


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id and 64 bytes of value."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_uint),
        ("value", ctypes.c_uint * 16),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class DriverError(RuntimeError):
    """A driver call that did not return 0."""


class Driver:
    """The CUDA driver with a context on device 0."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.device = device

    def call(self, name, *arguments):
        """Call a driver function; raise DriverError naming it where it fails."""
        code = getattr(self.library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {code} {(text.value or b'').decode()}")

    def describe(self):
        """Return the GPU's name and the driver's CUDA version."""
        name, version = ctypes.create_string_buffer(200), ctypes.c_int()
        self.call("cuDeviceGetName", name, 200, self.device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return {"gpu": name.value.decode(), "cuda_driver_api": version.value}

    def load(self, text):
        """Return (module, entry `kernel`) of PTX text; the error carries the JIT's log."""
        size = 16384
        log, errors = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)
        options = (ctypes.c_int * 4)(INFO_LOG, INFO_BYTES, ERROR_LOG, ERROR_BYTES)
        values = (ctypes.c_void_p * 4)(
            ctypes.cast(log, ctypes.c_void_p), size, ctypes.cast(errors, ctypes.c_void_p), size
        )
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            self.call(
                "cuModuleLoadDataEx",
                ctypes.byref(module),
                text.encode() + b"\0",
                4,
                options,
                values,
            )
        except DriverError as error:
            raise DriverError(f"{error}: {errors.value.decode()[:2000]}") from None
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"kernel")
        return module, function

    def allocate(self, data):
        """Return the device address of a copy of an array."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(data.nbytes))
        pointer = data.ctypes.data_as(ctypes.c_void_p)
        self.call("cuMemcpyHtoD_v2", address, pointer, ctypes.c_size_t(data.nbytes))
        return address.value

    def encode_tensor_map(self, record, address):
        """Return the 128 bytes of a tensor map (a 64-byte aligned array)."""
        raw = np.zeros(256, np.uint8)
        start = -raw.ctypes.data % 64
        data = raw[start : start + 128]
        rank = len(record["shape"])
        shape = (ctypes.c_uint64 * rank)(*record["shape"])
        strides = (ctypes.c_uint64 * max(rank - 1, 1))(*record["strides"])
        steps = (ctypes.c_uint32 * rank)(*(record["element_strides"] or [1] * rank))
        head = (
            data.ctypes.data_as(ctypes.c_void_p),
            DTYPES.index(record["dtype"]),
            rank,
            ctypes.c_uint64(address),
            shape,
            strides,
        )
        modes = (
            INTERLEAVES.index(record["interleave"]),
            SWIZZLES.index(record["swizzle"]),
            0,
            FILLS.index(record["oob_fill"]),
        )
        if record["pixel_lower"] is None:
            box = (ctypes.c_uint32 * rank)(*record["box"])
            self.call("cuTensorMapEncodeTiled", *head, box, steps, *modes)
        else:
            lower = (ctypes.c_int * (rank - 2))(*record["pixel_lower"])
            upper = (ctypes.c_int * (rank - 2))(*record["pixel_upper"])
            channels, pixels = record["box"]
            self.call(
                "cuTensorMapEncodeIm2col", *head, lower, upper, channels, pixels, steps, *modes
            )
        return data

    def launch(self, function, record, arguments):
        """Launch one program and wait for it."""
        attribute = LaunchAttribute(CLUSTER_DIMENSION, 0)
        attribute.value[0:3] = record["cluster"]
        config = LaunchConfig()
        config.grid[:] = record["grid"]
        config.block[:] = record["block"]
        config.shared_bytes = record["dynamic_shared"]
        if tuple(record["cluster"]) != (1, 1, 1):
            config.attributes = ctypes.pointer(attribute)
            config.num_attributes = 1
        pointers = (ctypes.c_void_p * len(arguments))(
            *(argument.ctypes.data for argument in arguments)
        )
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
        self.call("cuCtxSynchronize")

    def run(self, directory, name):
        """Return (outputs by name, tensor maps by name) of one program."""
        record = json.loads((directory / f"{name}.json").read_text())
        module, function = self.load((directory / f"{name}.ptx").read_text())
        arrays, addresses = {}, {}
        for buffer in record["inputs"] + record["outputs"]:
            arrays[buffer] = np.ascontiguousarray(np.load(directory / f"{name}.{buffer}.npy"))
            addresses[buffer] = self.allocate(arrays[buffer])
        maps = {
            m["name"]: self.encode_tensor_map(m, addresses[m["buffer"]]).copy()
            for m in record["tensor_maps"]
        }
        arguments = [np.array([address], np.uint64) for address in addresses.values()]
        self.launch(function, record, arguments + list(maps.values()))
        for buffer in record["outputs"]:
            data = arrays[buffer]
            pointer = data.ctypes.data_as(ctypes.c_void_p)
            size = ctypes.c_size_t(data.nbytes)
            self.call("cuMemcpyDtoH_v2", pointer, ctypes.c_uint64(addresses[buffer]), size)
        for address in addresses.values():
            self.call("cuMemFree_v2", ctypes.c_uint64(address))
        self.call("cuModuleUnload", module)
        for m in record["tensor_maps"]:
            stored = maps[m["name"]].view(np.uint64)
            assert stored[0] == addresses[m["buffer"]], "the first word is not the address"
            stored[0] = 0  # an address of this run
        return {b: arrays[b] for b in record["outputs"]}, maps


def work(directory, result_directory, names):
    """Run programs one after the other, saying so on stdout; ends at the first one that fails."""
    driver = Driver()
    print("ready", json.dumps(driver.describe()), flush=True)
    for name in names:
        print("start", name, flush=True)
        try:
            outputs, maps = driver.run(directory, name)
            again, _ = driver.run(directory, name)
        except DriverError as error:
            print("error", name, json.dumps(str(error)), flush=True)
            return
        is_stable = all(np.array_equal(outputs[b], again[b]) for b in outputs)
        arrays = {f"out.{key}": value for key, value in outputs.items()}
        arrays.update({f"map.{key}": value for key, value in maps.items()})
        np.savez(result_directory / f"{name}.npz", **arrays)
        print("done", name, json.dumps(is_stable), flush=True)


def read_lines(stream, end_time):
    """Yield lines of a worker until it ends, is silent for too long, or time is up."""
    descriptor, pending = stream.fileno(), b""
    while time.monotonic() < end_time:
        # No buffered reader here: select does not see what lies in a buffer.
        if not select.select([descriptor], [], [], SECONDS_PER_PROGRAM)[0]:
            return
        piece = os.read(descriptor, 65536)
        if not piece:
            return
        *lines, pending = (pending + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)


def watch(directory, result_directory, names, status, end_time):
    """Run a worker over `names`; return those that are still to do."""
    command = [sys.executable, __file__, str(directory), str(result_directory), "--work", *names]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    remaining, current, tail, is_ready, start = list(names), None, [], False, 0.0
    for line in read_lines(worker.stdout, end_time):
        word, _, rest = line.partition(" ")
        if word == "ready":
            status["machine"] = json.loads(rest)
            is_ready = True
        elif word == "start":
            current, start = rest, time.monotonic()
        elif word in ("done", "error"):
            name, _, value = rest.partition(" ")
            seconds = round(time.monotonic() - start, 2)
            entry = {"state": word, "value": json.loads(value), "seconds": seconds}
            status["programs"][name] = entry
            remaining.remove(name)
            current = None
        else:
            tail.append(line)
    worker.kill()
    if current:
        text = " ".join(tail)[-500:] or "no answer: it hangs"
        status["programs"][current] = {"state": "lost", "value": text}
        remaining.remove(current)
    if not is_ready:
        print("a worker did not start:", " ".join(tail)[-800:], flush=True)
    return remaining if is_ready and time.monotonic() < end_time else []


def run_share(directory, pieces, names, status, end_time):
    """Run a share of the programs, with a worker after the other."""
    while names:
        names = watch(directory, pieces, names, status, end_time)


def read_driver_version():
    """Return the driver's release, e.g. 580.159.04, or what nvidia-smi said instead."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError as error:
        return str(error)


def main(directory, result_directory):
    """Run every program of the directory and write the results."""
    names = sorted(path.stem for path in directory.glob("*.json"))
    status = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "driver": read_driver_version(),
        "machine": {},
        "programs": {},
        "digests": {n: json.loads((directory / f"{n}.json").read_text())["digest"] for n in names},
    }
    pieces = result_directory / "pieces"
    pieces.mkdir(parents=True, exist_ok=True)
    end_time = time.monotonic() + TOTAL_SECONDS
    threads = [
        threading.Thread(
            target=run_share, args=(directory, pieces, names[k::WORKERS], status, end_time)
        )
        for k in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with zipfile.ZipFile(result_directory / "results.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(pieces.glob("*.npz")):
            archive.writestr(path.name, io.BytesIO(path.read_bytes()).getvalue())
            path.unlink()
    pieces.rmdir()
    (result_directory / "status.json").write_text(json.dumps(status, indent=1))
    states = [entry["state"] for entry in status["programs"].values()]
    slow = sorted(status["programs"].items(), key=lambda item: -item[1].get("seconds", 0))[:6]
    print("slowest:", [(name, entry.get("seconds")) for name, entry in slow])
    print(
        {state: states.count(state) for state in set(states)}, status["machine"], status["driver"]
    )
    for name, entry in status["programs"].items():
        if entry["state"] != "done" or entry["value"] is not True:
            print(name, entry["state"], str(entry["value"])[:300])


if __name__ == "__main__":
    if "--work" in sys.argv:
        work(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[4:])
    else:
        main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
