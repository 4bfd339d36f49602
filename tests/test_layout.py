"""The shape of the repository: links that are links, dependencies that point one way, no stray files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("collectors", "daemon", "models")


@pytest.mark.parametrize("part", PARTS)
def test_source_links_are_relative_links(part: str) -> None:
    link = ROOT / "src" / "forewarn" / part
    assert link.is_symlink()
    assert link.readlink() == Path("..") / ".." / part


def test_dependencies_point_one_way() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


HEAVY = (
    "numpy",
    "pandas",
    "pydantic",
    "httpx",
    "lightgbm",
    "sklearn",
    "structlog",
    "fastapi",
    "pySMART",
    "duckdb",
)


@pytest.mark.parametrize("heavy", HEAVY)
def test_importing_the_agent_stays_slim(heavy: str) -> None:
    code = (
        "import sys, pkgutil, importlib, forewarn.collectors, forewarn.daemon.agent\n"
        "for package in (forewarn.collectors, forewarn.daemon.agent):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        if not module.name.endswith('_worker'):\n"
        "            importlib.import_module(module.name)\n"
        f"assert {heavy!r} not in sys.modules, 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_package_says_what_belongs_in_it() -> None:
    for part in PARTS:
        for init in (ROOT / part).rglob("__init__.py"):
            text = init.read_text()
            assert text.startswith('"""') and len(text) > 40, (
                f"{init} has no docstring that says what belongs there"
            )
