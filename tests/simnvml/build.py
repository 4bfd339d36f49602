"""Builds the simulated driver with gcc, once per source and variant, into `build/simnvml` of the repository."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from simnvml.layout import CALLS, header

HERE = Path(__file__).parent
BUILD = HERE.parent.parent / "build" / "simnvml"
SOURCE = HERE / "simnvml.c"
SONAME = "libnvidia-ml.so.1"
FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{SONAME}")


def missing() -> str:
    """Why the library cannot be built here; empty when it can."""
    return (
        "" if shutil.which("gcc") else "gcc is not found: install it to run what needs the simulated driver"
    )


def library(without: Iterable[str] = ()) -> Path:
    """The built library. `without` names symbols it must not export, as an older driver would not."""
    left_out = frozenset(without)
    if unknown := left_out.difference(CALLS):
        raise ValueError(f"the simulated driver has no symbol {sorted(unknown)}")
    text = SOURCE.read_text()
    exports = [name for name in CALLS if name not in left_out] + ["forewarn_simulated_nvml"]
    script = "{ global: " + " ".join(f"{name};" for name in exports) + " local: *; };\n"
    digest = hashlib.sha256("\0".join([text, header(), script, *FLAGS]).encode()).hexdigest()[:16]
    built = BUILD / digest / SONAME
    if built.exists():
        return built
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as work:
        folder = Path(work)
        (folder / "simnvml_layout.h").write_text(header())
        (folder / "exports").write_text(script)
        made = folder / SONAME
        command = [
            "gcc",
            *FLAGS,
            f"-I{folder}",
            f"-Wl,--version-script={folder / 'exports'}",
            "-o",
            str(made),
        ]
        subprocess.run([*command, str(SOURCE), "-lpthread", "-ldl"], check=True)
        built.parent.mkdir(exist_ok=True)
        made.replace(built)  # two test runs may build at once: the last one wins, whole
    return built
