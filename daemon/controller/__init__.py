"""The training side: tells of each step, hears a protection, has the loop save, and acknowledges."""

from forewarn.daemon.controller.progress import Progress

__all__ = ["Progress"]
