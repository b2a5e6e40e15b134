"""DLPack with the device that the program believes in: capsules and the C exchange API.

Offsets are those of dlpack.h 1.x: in a DLManagedTensor the tensor comes first, in a
DLManagedTensorVersioned after 32 bytes; in a DLTensor the device (i32 type, i32 ordinal) comes
after the data pointer.
"""

import ctypes
from typing import Any

import torch

from halfbyte.virtual.driver.patching import Patches
from halfbyte.virtual.driver.torch_cuda.tensors import DeviceTensors

KDL_CPU, KDL_CUDA = 1, 2
_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"
_DEVICE_OFFSET = {_PLAIN: 8, _VERSIONED: 40}
_ATTRIBUTE = "__dlpack_c_exchange_api__"
_CAPSULE = b"dlpack_exchange_api"

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_make_capsule = ctypes.pythonapi.PyCapsule_New
_make_capsule.restype = ctypes.py_object
_make_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def set_capsule_device(capsule: Any, device: int, only_from: int | None = None) -> None:
    """Write the device type into a capsule that nobody has consumed yet."""
    for name, offset in _DEVICE_OFFSET.items():
        if _is_valid(capsule, name):
            word = ctypes.c_int32.from_address((_get_pointer(capsule, name) or 0) + offset)
            if only_from in (None, word.value):
                word.value = device


def make_capsule(tensor: torch.Tensor, max_version: tuple[int, int] | None) -> Any:
    """Return a DLPack capsule of a tensor on the device, its device type kDLCUDA."""
    with torch._C.DisableTorchFunction():
        if max_version is not None and max_version >= (1, 0):
            capsule = torch.Tensor.__dlpack__(tensor.detach(), max_version=max_version)
        else:
            capsule = torch._C._to_dlpack(tensor.detach())
    set_capsule_device(capsule, KDL_CUDA)
    return capsule


def patch_dlpack(patches: Patches, tensors: DeviceTensors) -> None:
    """Let torch import capsules of the virtual device, and export through the C exchange API."""
    original = torch._C._from_dlpack

    def from_dlpack(capsule: Any) -> torch.Tensor:
        set_capsule_device(capsule, KDL_CPU, only_from=KDL_CUDA)
        tensor: torch.Tensor = original(capsule)
        return tensor

    patches.set(torch._C, "_from_dlpack", from_dlpack)
    exchange = getattr(torch.Tensor, _ATTRIBUTE, None)
    if exchange is not None:
        # Consumers cache the table's address for the life of the process: every session has the
        # same table, and the one that is open decides which tensors are on the device.
        if not _kept:
            _kept.append(ExchangeApi(_get_pointer(exchange, _CAPSULE) or 0, tensors))
        _kept[0].tensors = tensors
        patches.set(torch.Tensor, _ATTRIBUTE, _make_capsule(_kept[0].address, _CAPSULE, None))


_kept: list["ExchangeApi"] = []
_POINTER = ctypes.c_void_p
_Allocate = ctypes.PYFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, _POINTER, _POINTER)
_Export = ctypes.PYFUNCTYPE(ctypes.c_int, _POINTER, _POINTER)
_Import = ctypes.PYFUNCTYPE(ctypes.c_int, _POINTER, _POINTER)
_Stream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, _POINTER)


class _Table(ctypes.Structure):
    """DLPackExchangeAPI of dlpack.h 1.3."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("previous", _POINTER),
        ("allocate", _POINTER),
        ("export", _POINTER),
        ("import_", _POINTER),
        ("export_tensor", _POINTER),
        ("stream", _POINTER),
    )


class ExchangeApi:
    """torch's C exchange API with the device type of tensors on the virtual device changed."""

    def __init__(self, address: int, tensors: DeviceTensors) -> None:
        """Wrap the table at `address`, which torch owns."""
        original = _Table.from_address(address)
        self.tensors = tensors
        self._allocate = _Allocate(original.allocate)
        self._export = _Export(original.export)
        self._import = _Import(original.import_)
        self._export_tensor = _Export(original.export_tensor) if original.export_tensor else None
        self._callbacks: list[Any] = [
            _Allocate(self.allocate),
            _Export(self.export),
            _Import(self.import_tensor),
            _Export(self.export_tensor),
            _Stream(self.get_stream),
        ]
        pointers = [ctypes.cast(one, _POINTER).value for one in self._callbacks]
        if self._export_tensor is None:
            pointers[3] = None
        self._table = _Table(original.version, None, *pointers)

    @property
    def address(self) -> int:
        """Where the table is."""
        return ctypes.addressof(self._table)

    def export(self, tensor: int, out: int) -> int:
        """Export a tensor as a DLManagedTensorVersioned."""
        code = self._export(tensor, out)
        if code == 0 and self._is_resident(tensor):
            managed = ctypes.c_void_p.from_address(out).value or 0
            _set_device(managed + _DEVICE_OFFSET[_VERSIONED], KDL_CUDA)
        return int(code)

    def export_tensor(self, tensor: int, out: int) -> int:
        """Export a tensor as a borrowed DLTensor."""
        assert self._export_tensor is not None
        code = self._export_tensor(tensor, out)
        if code == 0 and self._is_resident(tensor):
            _set_device(out + _DEVICE_OFFSET[_PLAIN], KDL_CUDA)
        return int(code)

    def import_tensor(self, managed: int, out: int) -> int:
        """Make a tensor of a DLManagedTensorVersioned."""
        _replace_device(managed + _DEVICE_OFFSET[_VERSIONED], KDL_CUDA, KDL_CPU)
        return int(self._import(managed, out))

    def allocate(self, prototype: int, out: int, context: int, set_error: int) -> int:
        """Allocate like a prototype DLTensor, on the device if it says so."""
        is_cuda = _replace_device(prototype + _DEVICE_OFFSET[_PLAIN], KDL_CUDA, KDL_CPU)
        code = self._allocate(prototype, out, context, set_error)
        if not is_cuda:
            return int(code)
        _set_device(prototype + _DEVICE_OFFSET[_PLAIN], KDL_CUDA)
        return int(code) if code else self._move_to_device(out)

    def _move_to_device(self, out: int) -> int:
        found = ctypes.c_void_p()
        managed = ctypes.c_void_p.from_address(out)
        if self._import(managed.value, ctypes.addressof(found)):
            return -1
        tensor = ctypes.cast(found, ctypes.py_object).value
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(tensor))  # the reference `_import` gave
        self.tensors.adopt([tensor])
        return self.export(id(tensor), out)

    def get_stream(self, kind: int, ordinal: int, out: int) -> int:
        """Answer with the current stream's handle; only the virtual device has one."""
        handle = torch.cuda.current_stream().cuda_stream if kind == KDL_CUDA else 0
        ctypes.c_uint64.from_address(out).value = handle
        return 0

    def _is_resident(self, tensor: int) -> bool:
        return self.tensors.is_on_device(ctypes.cast(tensor, ctypes.py_object).value)


def _set_device(address: int, device: int) -> None:
    ctypes.c_int32.from_address(address).value = device


def _replace_device(address: int, wanted: int, given: int) -> bool:
    """Change the device type `wanted` to `given`; tell whether it was `wanted`."""
    word = ctypes.c_int32.from_address(address)
    if word.value != wanted:
        return False
    word.value = given
    return True
