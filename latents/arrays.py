"""Arrays in .npy files, in pickles and in files of torch.save. None is read by running code that it names."""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
import tokenize
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError


def check_float(where: str, dtype: np.dtype) -> np.dtype:
    """Raises UserError, naming `where`, for anything but float16 and float32 of this machine's byte order."""
    if dtype == np.float64:
        raise UserError(f"{where} is float64; latents are float32 or float16: save it again with .astype(np.float32)")
    if dtype not in (np.float16, np.float32) or not dtype.isnative:
        raise UserError(f"{where} is {dtype}; latents are float32 or float16 in little-endian byte order")
    return dtype


# ----------------------------------------------------------------------------------------------------------------------
# .npy.


HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def locate_npy(where: str, payload: bytes) -> tuple[np.dtype, tuple[int, ...], int]:
    """(dtype, shape, offset of the values) of a file in .npy format.

    Raises:
        UserError: it is not one, is truncated, or is in Fortran order. The message begins with `where`.
    """
    stream = io.BytesIO(payload)
    try:
        shape, fortran_order, dtype = HEADER_READERS[np.lib.format.read_magic(stream)](stream)
    except (ValueError, KeyError, SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError) as e:
        raise UserError(f"{where} is not in .npy format, or is truncated: {e}") from e
    offset = stream.tell()
    if fortran_order:
        raise UserError(f"{where} is in Fortran order; save it again with np.ascontiguousarray")
    if not dtype.hasobject and len(payload) != offset + dtype.itemsize * math.prod(shape):
        raise UserError(f"{where} is truncated: {len(payload) - offset} bytes are not {dtype} {list(shape)}")
    return dtype, shape, offset


def parse_npy(where: str, payload: bytes) -> np.ndarray:
    """The array of an .npy file. Raises UserError as `locate_npy`, and for Python objects."""
    dtype, shape, offset = locate_npy(where, payload)
    if dtype.hasobject:
        raise UserError(f"{where} holds Python objects, not numbers")
    return np.frombuffer(payload, dtype=dtype, offset=offset).reshape(shape)


# ----------------------------------------------------------------------------------------------------------------------
# Pickles.


class _PickledDtype:
    """Takes the place of numpy.dtype while a pickle is read."""

    def __init__(self, code: str, align: bool = False, copy: bool = False):
        self.code, self.byte_order = code, "|"

    def __setstate__(self, state: tuple):
        self.byte_order = state[1]


class _PickledArray:
    """Takes the place of an array while a pickle is read: what the pickle says, not yet checked."""

    def __init__(self, data=None, dtype=None, shape=None, order="C", *unknown):
        self.data, self.dtype, self.shape, self.order = data, dtype, shape, order

    def __setstate__(self, state: tuple):
        *_, self.shape, self.dtype, is_fortran, self.data = state  # an old NumPy's has no version in front
        self.order = "F" if is_fortran else "C"


def _latin1(text: str, encoding: str) -> bytes:
    """Protocol 2 has no bytes: it writes them as text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin1")


# Everything that a pickled array names, under the names of old and new NumPy, and what is called in its place. No code
# that a pickle chooses runs: not even NumPy's own, whose __setstate__ trusts its input.
_ADMITTED = {
    ("numpy", "ndarray"): "numpy.ndarray",  # only ever an argument of _reconstruct
    ("numpy", "dtype"): _PickledDtype,
    ("_codecs", "encode"): _latin1,
    ("numpy.core.multiarray", "_reconstruct"): lambda subtype, shape, typecode: _PickledArray(),
    ("numpy._core.multiarray", "_reconstruct"): lambda subtype, shape, typecode: _PickledArray(),
    ("numpy.core.numeric", "_frombuffer"): _PickledArray,
    ("numpy._core.numeric", "_frombuffer"): _PickledArray,
}


class ArrayUnpickler(pickle.Unpickler):
    """Reads pickles that hold one NumPy array, and nothing else; `load` gives what the pickle says of it."""

    def find_class(self, module: str, name: str):
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and only NumPy arrays are admitted")
        return _ADMITTED[module, name]


def unpickle_array(where: str, payload: bytes) -> np.ndarray:
    """The array of a pickle of any protocol, read without running code that it names.

    Raises:
        UserError: it names anything else, or does not hold a float16 or float32 array in C order. The message begins
            with `where`.
    """
    try:
        pickled = ArrayUnpickler(io.BytesIO(payload)).load()
    # The documentation of pickle: damaged data may raise other exceptions, "not necessarily limited to" these.
    except (
        pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError, MemoryError, OverflowError,
        TypeError, ValueError,
    ) as e:  # fmt: skip
        raise UserError(f"{where} is refused, as a pickle of more than one array or a damaged one: {e}") from e
    if not (isinstance(pickled, _PickledArray) and isinstance(pickled.dtype, _PickledDtype)):
        raise UserError(f"{where} is a pickle, but not of a NumPy array")
    code, byte_order = pickled.dtype.code, pickled.dtype.byte_order
    if code not in ("f2", "f4", "f8") or byte_order not in ("<", "=", "|"):
        raise UserError(
            f"{where} is an array of type {byte_order}{code}; latents are float32 or float16 in little-endian byte order"
        )
    dtype = check_float(where, np.dtype(code))
    if pickled.order != "C":
        raise UserError(f"{where} is in Fortran order; save it again with np.ascontiguousarray")
    try:
        return np.frombuffer(pickled.data, dtype=dtype).reshape(pickled.shape)
    except (ValueError, TypeError) as e:
        raise UserError(f"{where} does not hold an array of the shape that it names: {e}") from e


def locate_in_pickle(payload: bytes, values: bytes) -> int | None:
    """Offset of an array's values in its pickle; None where they are not stored as bytes (protocol 2 writes text)."""
    # The instructions that push bytes: BINBYTES8, BYTEARRAY8, BINBYTES, SHORT_BINBYTES.
    size = len(values)
    pushes = [b"\x8e" + struct.pack("<Q", size), b"\x96" + struct.pack("<Q", size)]
    pushes += [b"B" + struct.pack("<I", size)] if size < 2**32 else []
    pushes += [b"C" + struct.pack("<B", size)] if size < 2**8 else []
    places = [payload.find(push + values) + len(push) for push in pushes if push + values in payload]
    return places[0] if len(places) == 1 else None


# ----------------------------------------------------------------------------------------------------------------------
# Files of torch.save.


def load_torch_file(file: Path) -> Any:
    """What torch.save wrote, read without running code that it names: tensors, and dictionaries and lists of them.

    Raises:
        UserError: it names anything else, is damaged, or cannot be read.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as e:
        named = re.search(r"GLOBAL (\S+)", str(e))
        raise UserError(
            f"{file} is refused: {f'it names {named[1]}' if named else 'it is damaged, or holds more than tensors'}, and only "
            "tensors are admitted, because other pickles can run code; where you trust it, save its tensors alone: "
            "torch.save(dict_of_tensors, file)"
        ) from e
    except OSError as e:
        raise UserError(f"cannot read {file}: {e.strerror or e}") from e
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError) as e:  # damaged
        raise UserError(f"{file} is truncated or not a file of torch.save: {str(e).splitlines()[0] if str(e) else e!r}") from e


def read_channel_statistics(file: Path, num_channels: int) -> tuple[list[float], list[float]]:
    """LightningDiT's latents_stats.pt: mean and standard deviation of each channel. Raises UserError where it is none."""
    stored = load_torch_file(file)
    values = [stored.get(name) for name in ("mean", "std")] if isinstance(stored, dict) else []
    fit = [isinstance(value, Tensor) and value.numel() == num_channels and bool(value.isfinite().all()) for value in values]
    if not (fit == [True, True] and (values[1] > 0).all()):
        raise UserError(f"{file} must hold mean and std, {num_channels} finite numbers each, as the latents have channels")
    mean, std = (value.double().flatten().tolist() for value in values)
    return mean, std
