"""Local file systems and the latency of their disks, from /proc/mounts, /proc/diskstats and statvfs(2)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from forewarn.collectors.base import Event, Sample
from forewarn.collectors.kernel_events import disk_of
from forewarn.collectors.sysfs import number, read_text

_LOCAL_TYPES = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "vfat"))
"""Only what sits on this host's disks: statvfs on a network mount may hang for ever."""
_WHOLE_DISK = re.compile(r"^(?:nvme\d+n\d+|(?:sd|vd|xvd|hd)[a-z]+|mmcblk\d+)$")
_OCTAL = re.compile(r"\\([0-7]{3})")
MAX_FILESYSTEMS = 64


class DiskLatency:
    """Average time of a read and a write, and the share of time a disk was busy, between two readings."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: dict[str, tuple[float, ...]] = {}

    def read(self, elapsed_s: float | None = None) -> list[Sample]:
        """Samples for disks that did something since the last call; the first call gives none."""
        now: dict[str, tuple[float, ...]] = {}
        for line in (read_text(self._path) or "").splitlines():
            words = line.split()
            if len(words) < 13 or not _WHOLE_DISK.match(words[2]):
                continue
            numbers = [number(w) for w in words[3:13]]
            if any(n is None for n in numbers):
                continue
            reads, _, _, read_ms, writes, _, _, write_ms, _, busy_ms = (n or 0.0 for n in numbers)
            now[words[2]] = (reads, read_ms, writes, write_ms, busy_ms)
        samples: list[Sample] = []
        for name, after in now.items():
            before = self._before.get(name)
            if before is None or any(b > a for b, a in zip(before, after, strict=True)):
                continue  # new, replaced, or its counters wrapped
            reads, read_ms, writes, write_ms, busy_ms = (a - b for a, b in zip(after, before, strict=True))
            disk = disk_of(name)
            if reads:
                samples.append(Sample(disk, "disk_read_latency_seconds", read_ms / reads / 1000))
            if writes:
                samples.append(Sample(disk, "disk_write_latency_seconds", write_ms / writes / 1000))
            if elapsed_s:
                samples.append(Sample(disk, "disk_busy_ratio", min(1.0, busy_ms / 1000 / elapsed_s)))
        self._before = now
        return _one_per_disk(samples)


def _one_per_disk(samples: list[Sample]) -> list[Sample]:
    """The worst of a disk's namespaces: nvme0n1 and nvme0n2 are one drive."""
    worst: dict[tuple[str, str], Sample] = {}
    for sample in samples:
        key = (sample.device, sample.metric)
        if key not in worst or sample.value > worst[key].value:
            worst[key] = sample
    return list(worst.values())


class FileSystems:
    """Space, inodes and read-only turns of local file systems."""

    def __init__(self, root: Path, mounts: list[str] | None) -> None:
        self._root = root
        self._only = None if mounts is None else frozenset(mounts)
        self._writable: set[str] = set()

    def read(self) -> tuple[list[Sample], list[Event]]:
        """Samples, and an event for each file system that was writable at the last call and is not now."""
        samples: list[Sample] = []
        events: list[Event] = []
        fullest = fewest_inodes = None
        read_only = 0
        seen: set[str] = set()
        for source, mount, kind, options in self._mounts():
            if source in seen or len(seen) >= MAX_FILESYSTEMS:
                continue
            seen.add(source)
            if "ro" in options:
                if mount in self._writable:
                    events.append(_turned_read_only(source, mount, kind))
                    self._writable.discard(mount)
                read_only += kind != "vfat"
            else:
                self._writable.add(mount)
            usage = self._usage(mount)
            if usage is None:
                continue
            free, used, inodes = usage
            samples.append(Sample("", "node_filesystem_free_bytes", free, {"mount": mount}))
            fullest = max(used, fullest or 0.0)
            if inodes is not None:
                fewest_inodes = max(inodes, fewest_inodes or 0.0)
        if fullest is not None:
            samples.append(Sample("", "node_filesystem_used_max_ratio", fullest))
        if fewest_inodes is not None:
            samples.append(Sample("", "node_filesystem_inodes_used_max_ratio", fewest_inodes))
        if seen:
            samples.append(Sample("", "node_filesystems_read_only", float(read_only)))
        return samples, events

    def _mounts(self) -> list[tuple[str, str, str, list[str]]]:
        found = []
        text = read_text(self._root / "proc/1/mounts") or read_text(self._root / "proc/mounts") or ""
        for line in text.splitlines():
            words = line.split()
            if len(words) < 4 or words[2] not in _LOCAL_TYPES:
                continue
            mount = _OCTAL.sub(lambda m: chr(int(m[1], 8)), words[1])
            if self._only is None or mount in self._only:
                found.append((words[0], mount, words[2], words[3].split(",")))
        return found

    def _usage(self, mount: str) -> tuple[float, float, float | None] | None:
        """Bytes free to all, share of space used, share of inodes used (None where there are none to count)."""
        try:
            status = os.statvfs(self._root / mount.lstrip("/"))
        except OSError:
            return None
        usable = status.f_blocks - status.f_bfree + status.f_bavail
        if usable <= 0:
            return None
        used = (status.f_blocks - status.f_bfree) / usable
        inodes = 1 - status.f_ffree / status.f_files if status.f_files else None
        return float(status.f_bavail * status.f_frsize), used, inodes


def _turned_read_only(source: str, mount: str, kind: str) -> Event:
    return Event(
        device=disk_of(source.rpartition("/")[2]),
        kind="filesystem",
        code="read_only",
        severity="critical",
        message=f"{kind} on {mount} ({source}) was writable and is now read-only",
        labels={"mount": mount},
    )
