"""How functions over large arrays are compiled. Everything that runs once per sample goes through `jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def jit(function: F) -> F:
    """Compile with numba on first use, without the interpreter lock, keeping the machine code beside the module.

    Where no folder can be written (a read-only install), the code is compiled anew in each process.
    """
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba's word for: no place for the cache
        return cast(F, numba.njit(nogil=True)(function))
