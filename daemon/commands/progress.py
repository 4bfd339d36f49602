"""How far long work is: a bar on a terminal, nothing when piped. Shared by the commands that take long."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Yields `show(text, share)` with share from 0 to 1."""
    if not sys.stderr.isatty():
        yield lambda text, share: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks = {"": bar.add_task("", total=1.0)}

        def show(text: str, share: float) -> None:
            bar.update(tasks[""], description=text, completed=min(1.0, max(0.0, share)))

        yield show
