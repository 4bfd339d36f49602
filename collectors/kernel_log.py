"""The kernel's log: XIDs, NVSwitch errors, PCIe, memory, disk, network and CPU trouble, as events.

Reads /dev/kmsg, or a file that a logger writes (`dmesg`, syslog, journal text). What lines mean stands in
`kernel_lines`; this module reads them, once each, in order, and gives them their time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from forewarn.collectors.base import CollectionError, Event, Reading
from forewarn.collectors.coalescing import Coalescer
from forewarn.collectors.errors import UnavailableError
from forewarn.collectors.kernel_events import Found, GpuAddress
from forewarn.collectors.kernel_lines import Conversation
from forewarn.collectors.kernel_prefix import strip_prefix
from forewarn.collectors.registry import Setup
from forewarn.collectors.sysfs import read_number

SOURCE = "kernel_log"
RECORD_BYTES = 16_384
"""Above the kernel's own largest record (8 KiB)."""
CHUNK_BYTES = 262_144
MAX_LINE_BYTES = 65_536
"""What of a line exceeds this is not looked at."""
RECORDS_PER_CLOCK_LOOK = 256

_WOKE = re.compile(r"(?:PM: )?(?:suspend exit|Timekeeping suspended for (\d{1,10}\.\d{1,6}) seconds)")
_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")


class Cursor(msgspec.Struct):
    """How far the log has been read; lets a restarted agent go on where the last one stopped.

    For the kernel's device: the boot and the last sequence number. For a file: its path, inode and offset, and
    the first bytes by which a file that was replaced under the same inode is told.
    """

    boot_id: str = ""
    sequence: int = -1
    path: str = ""
    inode: int = 0
    offset: int = 0
    head: str = ""


class _Sleep(msgspec.Struct, frozen=True):
    """A wake-up seen in the log after `position` events of this pass; how long the sleep was, where it says."""

    position: int
    seconds: float | None


class KernelLogCollector:
    """Events from the kernel's log.

    `path` is /dev/kmsg or a log file (below `setup.root`). `backlog` false skips what was logged before the
    start. `pci_map` gives local device ids by address (`0000:dc:00` to `gpu3`); without it events stand on the
    node, and `pci` says where. `user_records` true lets records in that programs wrote into /dev/kmsg: for
    tests of a cluster with injected faults, else never.

    Times of /dev/kmsg records are the kernel's clock, which stands still in suspend: each is turned into wall
    time against the monotonic clock at the moment of reading, less the suspends that the log tells of between
    the record and now. Of several suspends whose lengths the log does not give, only their sum is known: what
    was logged before them comes out too late by at most that sum.
    """

    name = SOURCE

    def __init__(
        self,
        setup: Setup,
        *,
        path: str = "/dev/kmsg",
        interval_s: float = 1.0,
        deadline_s: float = 5.0,
        backlog: bool = True,
        user_records: bool = False,
        pci_map: dict[str, str] | None = None,
    ) -> None:
        self.interval_s = interval_s
        self.deadline_s = deadline_s
        self._setup = setup
        self._given_path = path
        self._path = setup.root / path.lstrip("/") if str(setup.root) != "/" else Path(path)
        self._backlog = backlog
        self._user_records = user_records
        self._pci_map = dict(pci_map or {})
        self._uuids: dict[str, str] = {}
        self._fd: int | None = None
        self._is_device = False
        self._cursor = Cursor()
        self._skip_to = -1
        self._coalescer = Coalescer()
        self._conversation = Conversation()
        self._partial = b""
        self._partial_read: tuple[Found | GpuAddress, ...] | None = None
        self._started = False
        self._lost = 0
        self._sleeps: list[_Sleep] = []
        self._length_told = False
        self._asleep_before = 0.0
        self._batch: list[tuple[Found, float, float]] = []
        self._read: Callable[[int, int], bytes] = os.read

    # -- what the agent may ask and say --

    def state(self) -> dict[str, object]:
        """How far the log has been read, for `restore` after a restart. Plain values only."""
        state: dict[str, object] = msgspec.to_builtins(self._cursor)
        if self._partial and not self._partial_read:
            state["offset"] = self._cursor.offset - len(self._partial)  # a line without its end is read again
        return state

    def restore(self, state: dict[str, object]) -> None:
        """Go on where `state` says. What does not fit this boot or file is passed over: the log is read whole."""
        with contextlib.suppress(msgspec.ValidationError):
            self._cursor = msgspec.convert(state, Cursor)

    def gpu_uuids(self) -> dict[str, str]:
        """GPU UUIDs by address, as the driver logged them."""
        return dict(self._uuids)

    def fileno(self) -> int | None:
        """The open log, to wait on for the next record; None when it cannot be waited on (a file)."""
        return self._fd if self._is_device else None

    # -- the protocol --

    def collect(self) -> Reading:
        """All that was logged since the last call. Raises UnavailableError when the log cannot be read."""
        reading = Reading(samples=[], events=[], devices=[], errors=[])
        self._open()
        if self._is_device:
            try:
                self._read_device(reading)
            finally:
                self._give_batch()
        else:
            self._read_file(reading)
        self._started = True
        reading.events.extend(self._resolve(e) for e in self._coalescer.take(self._setup.clock.monotonic()))
        return reading

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    # -- opening --

    def _open(self) -> None:
        if self._fd is not None:
            if self._is_device:
                return
            if self._same_file():
                return
            self._drain_rotated()
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise self._unavailable(error) from error
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            os.close(fd)
            raise UnavailableError(
                f"kernel log {self._given_path} is a directory: set path to a log file or /dev/kmsg"
            )
        self._fd = fd
        self._is_device = stat.S_ISCHR(mode)
        try:
            if self._is_device:
                self._position_device(fd)
            else:
                self._position_file(fd)
        except OSError as error:
            self.close()
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> UnavailableError:
        path = self._given_path
        if error.errno == errno.ENOENT:
            return UnavailableError(
                f"kernel log {path} does not exist: in a container pass the host's /dev/kmsg in,"
                " or set path to a log file"
            )
        if error.errno in (errno.EACCES, errno.EPERM):
            return UnavailableError(
                f"kernel log {path} may not be read ({error.strerror}): with kernel.dmesg_restrict=1 the agent needs"
                " CAP_SYSLOG (AmbientCapabilities=CAP_SYSLOG in its unit), or the sysctl set to 0, or set path to a"
                " log file it may read, such as /var/log/kern.log through the group adm"
            )
        return UnavailableError(f"kernel log {path} cannot be read: {error.strerror or error}")

    def _position_device(self, fd: int) -> None:
        boot = self._boot_id()
        if self._cursor.boot_id == boot and boot:
            self._skip_to = self._cursor.sequence
        else:
            self._skip_to = -1
            self._cursor = Cursor(boot_id=boot)
        if not self._backlog and self._skip_to < 0 and not self._started:
            os.lseek(fd, 0, os.SEEK_END)

    def _boot_id(self) -> str:
        try:
            return (self._setup.root / "proc/sys/kernel/random/boot_id").read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def _position_file(self, fd: int) -> None:
        status = os.fstat(fd)
        known = self._cursor
        head = self._head(fd)
        regular = stat.S_ISREG(status.st_mode)
        if (
            regular
            and known.path == str(self._path)
            and known.inode == status.st_ino
            and known.offset <= status.st_size
            and head.startswith(known.head)
        ):
            os.lseek(fd, known.offset, os.SEEK_SET)
        else:
            offset = 0
            if regular and not self._backlog and not self._started:
                offset = os.lseek(fd, 0, os.SEEK_END)
            self._cursor = Cursor(path=str(self._path), inode=status.st_ino, offset=offset, head=head)
        self._partial, self._partial_read = b"", None

    @staticmethod
    def _head(fd: int) -> str:
        try:
            return os.pread(fd, 128, 0).hex()
        except OSError:
            return ""  # a pipe

    def _same_file(self) -> bool:
        """Whether the open file is still the one at the path, neither replaced nor cut short."""
        assert self._fd is not None
        here = os.fstat(self._fd)
        if not stat.S_ISREG(here.st_mode):
            return True
        try:
            there = self._path.stat()
        except OSError:
            return True  # rotated away and not yet made anew: go on with the one we hold
        if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino) or here.st_size < self._cursor.offset:
            return False
        return self._head(self._fd).startswith(self._cursor.head)

    def _drain_rotated(self) -> None:
        """The path names another file now: read what is left of the old one first."""
        assert self._fd is not None
        if self._head(self._fd).startswith(self._cursor.head):  # else it was cut short and written anew
            self._read_file(Reading(samples=[], events=[], devices=[], errors=[]))
        self.close()

    # -- the kernel's device: one record a read --

    def _read_device(self, reading: Reading) -> None:
        assert self._fd is not None
        stop = self._setup.clock.monotonic() + self.deadline_s / 2
        records = 0
        while True:
            records += 1
            if records % RECORDS_PER_CLOCK_LOOK == 0 and self._setup.clock.monotonic() >= stop:
                return  # the rest next time: it waits in the kernel
            try:
                raw = self._read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:
                    self._lost += 1  # overwritten before it was read; the next read gives the oldest there is
                    if self._lost % RECORDS_PER_CLOCK_LOOK == 0:
                        return
                    continue
                if error.errno == errno.EINVAL:
                    continue  # a record larger than the buffer is passed over by the kernel
                self.close()
                raise self._unavailable(error) from error
            if not raw:
                return
            self._device_record(raw, reading)

    def _device_record(self, raw: bytes, reading: Reading) -> None:
        head, separator, body = raw.partition(b";")
        fields = head.split(b",")
        if not separator or len(fields) < 3:
            return
        try:
            priority, sequence, microseconds = int(fields[0]), int(fields[1]), int(fields[2])
        except ValueError:
            return
        if sequence <= self._skip_to:
            return
        last = self._cursor.sequence
        if self._lost:
            self._lost = 0
            missing = sequence - last - 1 if last >= 0 else 0
            if missing > 0 or last < 0:
                reading.events.append(_gap(missing))
        self._cursor.sequence = max(last, sequence)
        if priority >> 3 and not self._user_records:
            return
        message = body.partition(b"\n")[0]
        if b"\\x" in message:
            message = _ESCAPE.sub(lambda m: bytes((int(m[1], 16),)), message)
        clock = self._setup.clock
        monotonic = clock.monotonic()
        at = clock.now() - (monotonic - microseconds / 1e6)
        text = message.decode("utf-8", "replace")
        if m := _WOKE.match(text):
            self._woke(float(m[1]) if m[1] else None)
        for found in self._conversation.read(text, strict=True):
            if isinstance(found, Found):
                self._batch.append((found, at, monotonic))
            else:
                self._take(found, at, monotonic)

    def _woke(self, seconds: float | None) -> None:
        """Note a wake-up. Some kernels print the length of the sleep first, and all say `suspend exit` after it."""
        if seconds is None and self._length_told:
            self._length_told = False
            return
        self._length_told = seconds is not None
        self._sleeps.append(_Sleep(len(self._batch), seconds))

    def _give_batch(self) -> None:
        """Hand on what one pass read, with later sleeps taken out of the times of what was logged before them."""
        asleep = self._asleep()
        unknown = [s for s in self._sleeps if s.seconds is None]
        known = sum(s.seconds or 0.0 for s in self._sleeps)
        rest = max(0.0, asleep - self._asleep_before - known) if len(unknown) == 1 else 0.0
        self._asleep_before = asleep
        for n, (found, at, monotonic) in enumerate(self._batch):
            later = sum(rest if s.seconds is None else s.seconds for s in self._sleeps if s.position > n)
            self._take(found, at - later, monotonic)
        self._batch, self._sleeps = [], []

    def _asleep(self) -> float:
        """Seconds this boot spent in suspend: uptime counts them, the monotonic clock does not."""
        uptime = read_number(self._setup.root / "proc/uptime")
        asleep = (uptime or 0.0) - self._setup.clock.monotonic()
        return asleep if uptime is not None and asleep > 1.0 else 0.0

    # -- a file: lines --

    def _read_file(self, reading: Reading) -> None:
        assert self._fd is not None
        clock = self._setup.clock
        stop = clock.monotonic() + self.deadline_s / 2
        while True:
            try:
                chunk = self._read(self._fd, CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self.close()
                raise self._unavailable(error) from error
            if not chunk:
                break
            if self._cursor.offset == 0 and chunk[:2] in (b"\xff\xfe", b"\xfe\xff"):
                reading.errors.append(
                    CollectionError(
                        SOURCE,
                        f"{self._given_path} is UTF-16 text",
                        remedy="convert it: iconv -f UTF-16 -t UTF-8",
                    )
                )
            self._cursor.offset += len(chunk)
            if not self._cursor.head:
                self._cursor.head = self._head(self._fd)
            self._lines(chunk)
            if clock.monotonic() >= stop:
                reading.errors.append(
                    CollectionError(
                        SOURCE,
                        f"{self._given_path}: more to read than one pass may take; it goes on next time",
                    )
                )
                return
        # A last line without its end: a whole file may well end so. Later growth is told apart in _lines.
        if self._partial and self._partial_read is None:
            self._partial_read = tuple(self._line(self._partial))

    def _lines(self, chunk: bytes) -> None:
        *whole, rest = (self._partial + chunk).split(b"\n")
        already = self._partial_read
        if whole:
            for i, line in enumerate(whole):
                self._line(line, already if i == 0 else None)
            self._partial_read = None
        elif not already:
            self._partial_read = None  # it has grown: read again what said nothing yet
        self._partial = rest[:MAX_LINE_BYTES]

    def _line(
        self, raw: bytes, already: tuple[Found | GpuAddress, ...] | None = None
    ) -> list[Found | GpuAddress]:
        """Read one line. `already` is what its beginning said when it was still without an end."""
        clock = self._setup.clock
        line = strip_prefix(raw[:MAX_LINE_BYTES].decode("utf-8", "replace"), clock.now())
        if not line.message or not (line.from_kernel or self._user_records):
            return []
        results = self._conversation.read(line.message)
        if not results:
            return []
        monotonic = clock.monotonic()
        at = line.time
        if at is None and line.boot_s is not None and 0 <= line.boot_s <= monotonic:
            at = clock.now() - (monotonic - line.boot_s)
        for found in results:
            if already and any(_same(found, before) for before in already):
                continue
            self._take(found, at, monotonic)
        return results

    # -- both --

    def _take(self, found: Found | GpuAddress, at: float | None, monotonic: float) -> None:
        if isinstance(found, GpuAddress):
            self._uuids[found.pci] = found.uuid
        else:
            self._coalescer.add(found, at, monotonic)

    def _resolve(self, event: Event) -> Event:
        if not event.pci:
            return event
        plain = event.pci.partition(".")[0]
        device = event.device or self._pci_map.get(event.pci) or self._pci_map.get(plain, "")
        uuid = self._uuids.get(plain) if event.kind == "xid" else None
        if device == event.device and not uuid:
            return event
        labels = {**event.labels, "uuid": uuid} if uuid else event.labels
        return msgspec.structs.replace(event, device=device, labels=labels)


def _same(a: Found | GpuAddress, b: Found | GpuAddress) -> bool:
    if isinstance(a, Found) and isinstance(b, Found):
        return (a.event.kind, a.event.code, a.event.pci) == (b.event.kind, b.event.code, b.event.pci)
    return a == b


def _gap(missing: int) -> Event:
    lost = f"{missing} kernel messages were" if missing else "kernel messages were"
    return Event(
        device="",
        kind="log_gap",
        code="overrun",
        severity="warning",
        message=f"{lost} overwritten before they could be read: enlarge the buffer (log_buf_len=) or poll more often",
        count=max(1, missing),
    )
