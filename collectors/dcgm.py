"""GPUs as an existing dcgm-exporter gives them: for hosts where DCGM runs already, or where NVML cannot be used.

Scrapes one page a poll. What its fields mean stands in `dcgm_page`; this module fetches, and tells a live page
from a stale one.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
import zlib
from typing import IO, Any

from forewarn.collectors.base import CollectionError, Device, Event, Reading
from forewarn.collectors.dcgm_page import GpuRow, Page, read_page
from forewarn.collectors.errors import ConfigError, InputError, UnavailableError
from forewarn.collectors.registry import Setup
from forewarn.collectors.xids import xid_fact

SOURCE = "dcgm"
MAX_PAGE_BYTES = 16 * 1024 * 1024
CHUNK_BYTES = 65_536
ENERGY_STALE_S = 60.0
"""A GPU always draws power, so its energy counter always moves; DCGM samples it every 30 s or faster."""
GAUGES_STALE_S = 300.0
"""Without an energy counter: all of power, temperature and use, of all GPUs, the same for so long."""
_MOVING = (
    "gpu_power_watts",
    "gpu_temperature_celsius",
    "gpu_memory_temperature_celsius",
    "gpu_utilization_ratio",
)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None  # the answer then comes back as the HTTP error that it is


class DcgmCollector:
    """GPU metrics, and XIDs as far as DCGM tells of them, from one exporter.

    `url` is the exporter's page. `skip_nvml` true leaves out what the nvml collector reads too. `host` picks the
    rows of one host from a page that speaks of several. DCGM's own XID field is the last number seen, not a
    count: a change of it is an event, a second XID of the same number is not seen (the kernel log sees it).
    """

    name = SOURCE

    def __init__(
        self,
        setup: Setup,
        *,
        url: str = "http://127.0.0.1:9400/metrics",
        timeout_s: float = 5.0,
        interval_s: float = 15.0,
        deadline_s: float = 10.0,
        skip_nvml: bool = False,
        host: str = "",
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> None:
        scheme = urllib.parse.urlsplit(url).scheme.lower()
        if scheme not in ("http", "https") or not urllib.parse.urlsplit(url).hostname:
            raise ConfigError(f"collector dcgm: url = {url!r} must be an http:// or https:// address")
        if timeout_s <= 0:
            raise ConfigError(f"collector dcgm: timeout_s = {timeout_s} must be above 0")
        self.interval_s = interval_s
        self.deadline_s = deadline_s
        self._setup = setup
        self._url = url
        self._timeout_s = min(timeout_s, deadline_s)
        self._skip_nvml = skip_nvml
        self._host = host
        self._max_bytes = max_bytes
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
        self._moved: dict[str, tuple[float, float]] = {}
        self._gauges: tuple[tuple[float | None, ...], float] | None = None
        self._last_xid: dict[str, float] = {}
        self._xid_counts: dict[str, dict[int, float]] = {}
        self._scraped = False

    def collect(self) -> Reading:
        """One scrape. Raises UnavailableError when the exporter does not answer with a page."""
        try:
            page = read_page(self._fetch(), self._host)
        except InputError as error:
            raise UnavailableError(f"dcgm-exporter at {self._url}: {error}: check the url setting") from error
        reading = Reading(samples=[], events=[], devices=[], errors=[])
        if page.bad_lines:
            reading.errors.append(
                CollectionError(
                    SOURCE,
                    f"{page.bad_lines} lines of {self._url} could not be read, the first: {page.first_bad}",
                )
            )
        if not self._host and len(page.hosts) > 1:
            raise UnavailableError(
                f"dcgm-exporter at {self._url} speaks of {len(page.hosts)} hosts ({', '.join(page.hosts[:3])}, ...):"
                " scrape this host's own exporter, or set host"
            )
        if not page.gpus:
            self._empty(page)
        now = self._setup.clock.monotonic()
        stale = self._stale(page, now, reading)
        for local, gpu in list(page.gpus.items()):
            if local in stale:
                del page.gpus[local]
            else:
                reading.devices.append(gpu.device)
                if not self._skip_nvml:
                    reading.events.extend(self._xids(local, gpu))
        self._scraped = True
        reading.samples.extend(page.samples(self._skip_nvml))
        return reading

    def close(self) -> None:
        self._opener.close()

    def _empty(self, page: Page) -> None:
        if page.foreign and not page.rows - page.foreign:
            raise UnavailableError(
                f"{self._url} is not a dcgm-exporter page (it has {page.foreign} rows and none of DCGM):"
                " check the url setting"
            )
        if self._host and page.hosts:
            raise UnavailableError(
                f"dcgm-exporter at {self._url} has no row of host {self._host!r}"
                f" (it has {', '.join(page.hosts[:3])}): check host"
            )
        raise UnavailableError(
            f"dcgm-exporter at {self._url} gives no GPU: its host engine is gone or has lost the driver;"
            " restart nv-hostengine and the exporter"
        )

    # -- fetching --

    def _fetch(self) -> str:
        request = urllib.request.Request(  # noqa: S310 - the scheme is checked when the collector is made
            self._url, headers={"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"}
        )
        until = self._setup.clock.monotonic() + self._timeout_s
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                body = self._body(answer, until)
                encoding = (answer.headers.get("Content-Encoding") or "identity").lower()
        except urllib.error.HTTPError as error:
            error.close()
            hint = "; redirects are not followed, set the final address" if 300 <= error.code < 400 else ""
            raise self._unreachable(f"answered {error.code} {error.reason}{hint}") from error
        except (http.client.HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise self._unreachable(
                    f"did not answer within {self._timeout_s:g} s: see its log, or raise timeout_s"
                ) from error
            raise self._unreachable(
                f"cannot be reached ({reason}): is it running, and is url right?"
            ) from error
        return self._text(body, encoding)

    def _unreachable(self, what: str) -> UnavailableError:
        return UnavailableError(f"dcgm-exporter at {self._url} {what}")

    def _body(self, answer: Any, until: float) -> bytes:
        expected = answer.headers.get("Content-Length", "")
        parts: list[bytes] = []
        size = 0
        while True:
            part = answer.read1(CHUNK_BYTES)
            if not part:
                break
            size += len(part)
            if size > self._max_bytes:
                raise InputError(f"the page is larger than {self._max_bytes} bytes")
            if self._setup.clock.monotonic() > until:
                raise TimeoutError
            parts.append(part)
        if expected.isdigit() and size < int(expected):
            raise InputError(f"the page was cut short ({size} of {expected} bytes)")
        return b"".join(parts)

    def _text(self, body: bytes, encoding: str) -> str:
        if encoding in ("gzip", "deflate") or body[:2] == b"\x1f\x8b":
            inflater = zlib.decompressobj(wbits=47)
            try:
                body = inflater.decompress(body, self._max_bytes)
            except zlib.error as error:
                raise InputError(f"the page is not valid {encoding} data") from error
            if inflater.unconsumed_tail:
                raise InputError(f"the page inflates to more than {self._max_bytes} bytes")
        elif encoding != "identity":
            raise InputError(f"the page comes in an encoding that was not asked for ({encoding})")
        if b"\x00" in body[:4096]:
            raise InputError("the page is not UTF-8 text")
        return body.decode("utf-8-sig", "replace")

    # -- is it alive --

    def _stale(self, page: Page, now: float, reading: Reading) -> set[str]:
        """GPUs whose values stand still although they cannot: the host engine hangs, or lost that GPU."""
        stale: dict[str, float] = {}
        with_energy = 0
        for local, gpu in page.gpus.items():
            energy = gpu.values.get("gpu_energy_joules_total")
            if energy is None:
                continue
            with_energy += 1
            before = self._moved.get(local)
            if before is None or before[0] != energy:
                self._moved[local] = (energy, now)
            elif now - before[1] >= ENERGY_STALE_S:
                stale[local] = now - before[1]
        if not with_energy:
            seconds = self._gauges_stand_since(page, now)
            if seconds >= GAUGES_STALE_S:
                stale = dict.fromkeys(page.gpus, seconds)
        if stale and len(stale) == len(page.gpus):
            reading.errors.append(
                CollectionError(
                    SOURCE,
                    f"the values of {self._url} have not moved for {max(stale.values()):.0f} s: its host engine hangs",
                    remedy="restart nv-hostengine and dcgm-exporter",
                )
            )
        else:
            reading.errors.extend(
                CollectionError(
                    SOURCE,
                    f"values of {local} have not moved for {seconds:.0f} s while others do",
                    device=local,
                    remedy="look for the GPU with nvidia-smi and in the kernel log",
                )
                for local, seconds in stale.items()
            )
        return set(stale)

    def _gauges_stand_since(self, page: Page, now: float) -> float:
        shape = tuple(gpu.values.get(m) for gpu in page.gpus.values() for m in _MOVING)
        if sum(v is not None for v in shape) < 2:
            return 0.0  # too little on the page to judge by
        if self._gauges is None or self._gauges[0] != shape:
            self._gauges = (shape, now)
        return now - self._gauges[1]

    # -- XIDs --

    def _xids(self, local: str, gpu: GpuRow) -> list[Event]:
        events: list[Event] = []
        if gpu.xid_counts:
            before = self._xid_counts.get(local)
            if before is not None or self._scraped:
                for number, count in gpu.xid_counts.items():
                    rise = count - (before or {}).get(number, 0.0)
                    if rise >= 1 and number:
                        events.append(_xid_event(gpu.device, number, int(rise)))
            self._xid_counts[local] = dict(gpu.xid_counts)
            return events
        last = gpu.values.get("gpu_last_xid")
        if last is None:
            return events
        before_last = self._last_xid.get(local)
        self._last_xid[local] = last
        if last and before_last is not None and last != before_last:
            events.append(_xid_event(gpu.device, int(last), 1))
        return events


def _xid_event(device: Device, number: int, count: int) -> Event:
    fact = xid_fact(number)
    return Event(
        device=device.device,
        kind="xid",
        code=str(number),
        severity=fact.severity if fact else "warning",
        message=f"DCGM reports XID {number}" + (f": {fact.meaning}" if fact else ""),
        action=fact.action if fact else "CONTACT_SUPPORT",
        pci=device.pci,
        count=count,
    )
