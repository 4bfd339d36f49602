"""Scraping dcgm-exporter: units, blanks, MIG, XIDs, stale pages, and servers of every bad habit."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.collectors.base import Collector, Reading
from forewarn.collectors.catalog import METRICS
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.dcgm import ENERGY_STALE_S, GAUGES_STALE_S, DcgmCollector
from forewarn.collectors.dcgm_page import FIELDS, NOT_FROM_NVML, RENAMED, is_blank, read_page
from forewarn.collectors.errors import ConfigError, InputError, UnavailableError
from forewarn.collectors.registry import Setup, create

CASES = Path(__file__).parents[1] / "cases" / "dcgm"
SHARED = Path(__file__).parents[3] / "shared" / "cases" / "dcgm"
DEFAULT = (CASES / "default.prom").read_text()


class Exporter:
    """A loopback server whose answer the test sets."""

    def __init__(self) -> None:
        self.body: bytes = b""
        self.status = 200
        self.headers: dict[str, str] = {}
        self.before: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.requests = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.requests += 1
                if owner.before is not None:
                    owner.before(self)
                    return
                self.send_response(owner.status)
                for name, value in {"Content-Length": str(len(owner.body)), **owner.headers}.items():
                    if value:
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(owner.body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that gave up is what some tests are about

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    server = Exporter()
    yield server
    server.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def _collector(exporter: Exporter, clock: ManualClock, **options: object) -> DcgmCollector:
    return DcgmCollector(Setup(clock), url=exporter.url, timeout_s=5.0, **options)  # type: ignore[arg-type]  # options of the test


def _values(reading: Reading) -> dict[tuple[str, str], float]:
    return {(s.device, s.metric): s.value for s in reading.samples}


# --- the page ---


def test_every_field_is_in_the_catalog() -> None:
    for field, (metric, factor) in FIELDS.items():
        assert metric in METRICS, field
        assert factor > 0
    assert set(NOT_FROM_NVML) <= set(METRICS)


def test_renamed_fields_lead_to_known_ones() -> None:
    assert set(RENAMED.values()) <= set(FIELDS)
    assert not set(RENAMED) & set(FIELDS)


def test_the_names_of_the_next_dcgm_are_read() -> None:
    page = read_page(
        'DCGM_FI_DEV_GPU_TEMP_CELSIUS{gpu="0"} 55\n'
        'DCGM_FI_DEV_BOARD_POWER_WATTS{gpu="0"} 400.5\n'
        "# TYPE DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL counter\n"
        'DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL{gpu="0"} 2\n'
        'DCGM_FI_DEV_GPU_UTIL_RATIO{gpu="0"} 97\n'
    )
    assert page.gpus["gpu0"].values == pytest.approx(
        {
            "gpu_temperature_celsius": 55.0,
            "gpu_power_watts": 400.5,
            "gpu_row_remap_uncorrected_total": 2.0,
            "gpu_utilization_ratio": 0.97,
        }
    )


def test_rows_of_single_links_are_put_together() -> None:
    page = read_page(
        'DCGM_FI_DEV_NVLINK_COUNT_RX_ERRORS{gpu="0",nvlink="0"} 2\n'
        'DCGM_FI_DEV_NVLINK_COUNT_RX_ERRORS{gpu="0",nvlink="1"} 5\n'
        'DCGM_FI_DEV_NVLINK_COUNT_SYMBOL_BER_FLOAT{gpu="0",nvlink="0"} 1e-12\n'
        'DCGM_FI_DEV_NVLINK_COUNT_SYMBOL_BER_FLOAT{gpu="0",nvlink="1"} 3e-9\n'
    )
    assert page.gpus["gpu0"].values == {
        "gpu_nvlink_receive_errors_total": 7.0,
        "gpu_nvlink_symbol_bit_error_ratio": 3e-9,
    }


def test_default_page_in_catalog_units(exporter: Exporter, clock: ManualClock) -> None:
    exporter.body = DEFAULT.encode()
    reading = _collector(exporter, clock).collect()
    mib = 1024 * 1024
    assert _values(reading) == pytest.approx(
        {
            ("gpu0", "gpu_sm_clock_hertz"): 1.98e9,
            ("gpu1", "gpu_sm_clock_hertz"): 3.45e8,
            ("gpu0", "gpu_temperature_celsius"): 61,
            ("gpu1", "gpu_temperature_celsius"): 31,
            ("gpu0", "gpu_power_watts"): 688.417,
            ("gpu0", "gpu_energy_joules_total"): 123456,
            ("gpu0", "gpu_utilization_ratio"): 0.98,
            ("gpu0", "gpu_violation_power_seconds_total"): 2.5,
            ("gpu0", "gpu_memory_used_bytes"): 80000 * mib,
            ("gpu0", "gpu_memory_reserved_bytes"): 559 * mib,
            ("gpu0", "gpu_memory_total_bytes"): 81559 * mib,
            ("gpu0", "gpu_last_xid"): 0,
            ("gpu0", "gpu_row_remap_failure"): 0,
            ("gpu0", "gpu_tensor_active_ratio"): 0.413,
        }
    )
    first = reading.devices[0]
    assert (first.device, first.kind, first.pci) == ("gpu0", "gpu", "0000:1b:00")
    assert first.serial == "GPU-00000000-0000-0000-0000-000000000000"
    assert first.labels == {"driver": "570.195.03"}
    assert reading.errors == []


@pytest.mark.skipif(not SHARED.exists(), reason="the shared cases are not beside this checkout")
def test_shared_pages_are_read_whole() -> None:
    pages = sorted(SHARED.glob("*.prom"))
    assert pages
    for path in pages:
        page = read_page(path.read_text())
        assert page.bad_lines == 0
        assert sorted(page.gpus) == [f"gpu{i}" for i in range(8)]
        for gpu in page.gpus.values():
            assert gpu.values["gpu_memory_clock_hertz"] == 2619e6
            assert gpu.values["gpu_encoder_utilization_ratio"] == 0.0
            assert 3e8 < gpu.values["gpu_sm_clock_hertz"] < 2e9


def test_mig_instances_make_one_gpu() -> None:
    page = read_page((CASES / "mig.prom").read_text())
    (gpu,) = page.gpus.values()
    assert gpu.device.serial == "GPU-a"
    assert gpu.values == {
        "gpu_temperature_celsius": 44.0,
        "gpu_memory_used_bytes": 40 * 1024 * 1024,
        "gpu_mig_enabled": 1.0,
    }


@pytest.mark.parametrize(
    ("number", "blank"),
    [
        (2147483632, True),
        (2147483634, True),
        (2147483647, True),
        (2147483631, False),
        (9223372036854775792, True),
        (9223372036854775807, True),
        (140737488355328.0, True),
        (140737488355330.0, True),
        (140737488355327.0, False),
        (float("nan"), True),
        (float("inf"), True),
        (0, False),
    ],
)
def test_blanks(number: float, blank: bool) -> None:
    assert is_blank(float(number)) is blank


@pytest.mark.parametrize(
    "line",
    [
        'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 250',
        'DCGM_FI_DEV_GPU_TEMP{gpu="0"} 900',
        'DCGM_FI_DEV_POWER_USAGE{gpu="0"} -5',
        'DCGM_FI_DEV_POWER_USAGE{gpu="0"} NaN',
        'DCGM_FI_DEV_GPU_TEMP{gpu="x"} 40',
        "DCGM_FI_DEV_GPU_TEMP 40",
    ],
)
def test_impossible_values_are_absent(line: str) -> None:
    page = read_page(line + "\n")
    assert all(gpu.values == {} for gpu in page.gpus.values())


def test_one_bad_line_does_not_cost_the_page(exporter: Exporter, clock: ManualClock) -> None:
    exporter.body = DEFAULT.replace('DCGM_FI_DEV_GPU_UTIL{gpu="0"', 'DCGM_FI_DEV_GPU_UTIL{gpu="0').encode()
    reading = _collector(exporter, clock).collect()
    assert ("gpu0", "gpu_power_watts") in _values(reading)
    (error,) = reading.errors
    assert "DCGM_FI_DEV_GPU_UTIL" in error.message


def test_a_cut_last_number_is_not_believed() -> None:
    page = read_page('DCGM_FI_DEV_GPU_TEMP{gpu="0"} 40\nDCGM_FI_DEV_POWER_USAGE{gpu="0"} 68')
    assert page.gpus["gpu0"].values == {"gpu_temperature_celsius": 40.0}
    assert page.bad_lines == 1


def test_enforced_limit_wins_over_the_managed_one() -> None:
    lines = ['DCGM_FI_DEV_ENFORCED_POWER_LIMIT{gpu="0"} 600', 'DCGM_FI_DEV_POWER_MGMT_LIMIT{gpu="0"} 700']
    for order in (lines, lines[::-1]):
        assert read_page("\n".join(order) + "\n").gpus["gpu0"].values == {"gpu_power_limit_watts": 600.0}


def test_what_nvml_gives_is_left_out_when_asked(exporter: Exporter, clock: ManualClock) -> None:
    exporter.body = DEFAULT.encode()
    reading = _collector(exporter, clock, skip_nvml=True).collect()
    assert {s.metric for s in reading.samples} == {"gpu_last_xid", "gpu_tensor_active_ratio"}


def test_rows_of_another_host_are_passed_over(exporter: Exporter, clock: ManualClock) -> None:
    exporter.body = (DEFAULT + 'DCGM_FI_DEV_GPU_TEMP{gpu="5",Hostname="node-b"} 40\n').encode()
    with pytest.raises(UnavailableError, match=r"2 hosts.*set host"):
        _collector(exporter, clock).collect()
    devices = {d.device for d in _collector(exporter, clock, host="node-a.site.example").collect().devices}
    assert devices == {"gpu0", "gpu1"}
    with pytest.raises(UnavailableError, match="no row of host 'node-c'"):
        _collector(exporter, clock, host="node-c").collect()


# --- XIDs ---


def _with_xid(number: int) -> bytes:
    return DEFAULT.replace('err_msg="No Error"} 0', f'err_msg="x"}} {number}').encode()


def test_an_xid_is_an_event_only_when_it_changes(exporter: Exporter, clock: ManualClock) -> None:
    collector = _collector(exporter, clock)
    exporter.body = _with_xid(31)
    assert collector.collect().events == []  # of unknown age
    exporter.body = _with_xid(79)
    (event,) = collector.collect().events
    assert (event.device, event.kind, event.code, event.severity) == ("gpu0", "xid", "79", "critical")
    assert (event.action, event.pci) == ("RESTART_BM", "0000:1b:00")
    assert collector.collect().events == []
    exporter.body = _with_xid(0)
    assert collector.collect().events == []


def test_counted_xids_give_counts(exporter: Exporter, clock: ManualClock) -> None:
    collector = _collector(exporter, clock)
    line = 'DCGM_EXP_XID_ERRORS_COUNT{{gpu="0",Hostname="node-a",window_size_in_ms="300000",xid="{}"}} {}\n'
    exporter.body = (DEFAULT + line.format(31, 2)).encode()
    assert collector.collect().events == []
    exporter.body = (DEFAULT + line.format(31, 5) + line.format(94, 1)).encode()
    events = collector.collect().events
    assert {(e.code, e.count) for e in events} == {("31", 3), ("94", 1)}


# --- stale pages ---


def test_energy_that_stands_still_is_a_stale_page(exporter: Exporter, clock: ManualClock) -> None:
    exporter.body = DEFAULT.replace("9223372036854775794", "555000").encode()
    collector = _collector(exporter, clock)
    assert collector.collect().samples
    clock.advance(ENERGY_STALE_S + 1)
    reading = collector.collect()
    assert reading.samples == []
    (error,) = reading.errors
    assert "have not moved" in error.message
    assert "nv-hostengine" in error.remedy
    exporter.body = exporter.body.replace(b"123456000", b"123999000").replace(b"555000", b"556000")
    assert collector.collect().samples


def test_one_gpu_that_stands_still_is_told_apart(exporter: Exporter, clock: ManualClock) -> None:
    exporter.body = DEFAULT.replace("9223372036854775794", "555000").encode()
    collector = _collector(exporter, clock)
    collector.collect()
    clock.advance(ENERGY_STALE_S + 1)
    exporter.body = exporter.body.replace(b"123456000", b"123999000")
    reading = collector.collect()
    assert {s.device for s in reading.samples} == {"gpu0"}
    (error,) = reading.errors
    assert error.device == "gpu1"


def test_without_energy_all_gauges_must_stand_still_for_long(exporter: Exporter, clock: ManualClock) -> None:
    page = 'DCGM_FI_DEV_GPU_TEMP{{gpu="0"}} {}\nDCGM_FI_DEV_POWER_USAGE{{gpu="0"}} 71.5\n'
    collector = _collector(exporter, clock)
    exporter.body = page.format(30).encode()
    collector.collect()
    clock.advance(GAUGES_STALE_S - 1)
    assert collector.collect().errors == []
    exporter.body = page.format(31).encode()
    collector.collect()
    clock.advance(GAUGES_STALE_S - 1)
    assert collector.collect().samples
    clock.advance(1)
    assert collector.collect().samples == []


def test_a_page_of_clocks_alone_is_never_called_stale(exporter: Exporter, clock: ManualClock) -> None:
    exporter.body = b'DCGM_FI_DEV_SM_CLOCK{gpu="0"} 1980\n'
    collector = _collector(exporter, clock)
    for _ in range(5):
        assert collector.collect().errors == []
        clock.advance(3600)


# --- bad servers ---


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"", "host engine is gone"),
        (b"# HELP x y\n# TYPE x gauge\n", "host engine is gone"),
        (b"node_load1 3\n", "not a dcgm-exporter page"),
        (b"<!DOCTYPE html><html><body>x</body></html>", "not in Prometheus text"),
        (b'{"error": "x"}', "not in Prometheus text"),
        (DEFAULT.encode("utf-16"), "not UTF-8"),
        (b"\x1f\x8bgarbage", "not valid"),
    ],
)
def test_other_pages_are_named(exporter: Exporter, clock: ManualClock, body: bytes, match: str) -> None:
    exporter.body = body
    with pytest.raises(UnavailableError, match=match) as caught:
        _collector(exporter, clock).collect()
    assert exporter.url in str(caught.value)


def test_page_in_gzip_is_read_and_a_bomb_is_not(exporter: Exporter, clock: ManualClock) -> None:
    exporter.headers = {"Content-Encoding": "gzip"}
    exporter.body = gzip.compress(DEFAULT.encode())
    assert _collector(exporter, clock).collect().samples
    exporter.body = gzip.compress(b"#" * 1_000_000)
    with pytest.raises(UnavailableError, match="inflates to more than"):
        _collector(exporter, clock, max_bytes=100_000).collect()


def test_a_huge_page_is_refused(exporter: Exporter, clock: ManualClock) -> None:
    exporter.body = DEFAULT.encode() * 40
    with pytest.raises(UnavailableError, match="larger than 100000 bytes"):
        _collector(exporter, clock, max_bytes=100_000).collect()


def test_a_page_cut_short_is_named(exporter: Exporter, clock: ManualClock) -> None:
    exporter.body = DEFAULT.encode()
    exporter.headers = {"Content-Length": str(len(exporter.body) + 100)}
    with pytest.raises(UnavailableError, match=r"cut short|cannot be reached"):
        _collector(exporter, clock).collect()


@pytest.mark.parametrize(
    ("status", "match"), [(302, "redirects are not followed"), (500, "500"), (401, "401")]
)
def test_other_answers(exporter: Exporter, clock: ManualClock, status: int, match: str) -> None:
    exporter.status = status
    exporter.headers = {"Location": "http://192.0.2.1/metrics"}
    with pytest.raises(UnavailableError, match=match):
        _collector(exporter, clock).collect()
    assert exporter.requests == 1


def test_silence_ends_at_the_timeout(exporter: Exporter, clock: ManualClock) -> None:
    release = threading.Event()

    def wait(_handler: BaseHTTPRequestHandler) -> None:
        release.wait(20)

    exporter.before = wait
    collector = DcgmCollector(Setup(clock), url=exporter.url, timeout_s=0.2)
    with pytest.raises(UnavailableError, match=r"did not answer within 0\.2 s"):
        collector.collect()
    release.set()


def test_a_server_that_drips_ends_at_the_timeout(exporter: Exporter, clock: ManualClock) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(5):
            handler.wfile.write(b"# x\n")
            handler.wfile.flush()
            clock.advance(3.0)

    exporter.before = drip
    with pytest.raises(UnavailableError, match=r"did not answer within 5 s"):
        _collector(exporter, clock).collect()


def test_nobody_there(exporter: Exporter, clock: ManualClock) -> None:
    collector = _collector(exporter, clock)
    exporter.close()
    with pytest.raises(UnavailableError, match="cannot be reached"):
        collector.collect()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "127.0.0.1:9400", "http://", ""])
def test_only_web_addresses(clock: ManualClock, url: str) -> None:
    with pytest.raises(ConfigError, match="http://"):
        DcgmCollector(Setup(clock), url=url)


def test_is_made_by_name(exporter: Exporter, clock: ManualClock) -> None:
    exporter.body = DEFAULT.encode()
    made = create("dcgm", {"url": exporter.url, "skip_nvml": "true"}, Setup(clock))
    assert isinstance(made, Collector)
    assert len(made.collect().samples) == 2
    made.close()


# --- anything ---

_PIECES = st.sampled_from(
    [
        *('DCGM_FI_DEV_GPU_TEMP{gpu="0"} 40\n', 'DCGM_FI_DEV_FB_FREE{gpu="0"} 5\n', "DCGM_FI_DEV_SM_CLOCK"),
        *('DCGM_EXP_XID_ERRORS_COUNT{gpu="0",xid="79"} 1\n', '{gpu="0",UUID="G"}', " 9223372036854775794"),
        *(
            "# TYPE DCGM_FI_DEV_GPU_TEMP counter\n",
            "# TYPE x histogram\n",
            "# HELP ",
            "# EOF\n",
            " 1e999",
            " NaN",
        ),
        *("\n", "\r\n", "\u2028", "\x00", "{", "}", '"', "\\", ",", "=", "é"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=400), st.lists(_PIECES, max_size=30).map("".join)))
def test_any_text_is_a_page_or_an_error_that_says_so(text: str) -> None:
    try:
        page = read_page(text)
    except InputError:
        return
    for gpu in page.gpus.values():
        for metric, value in gpu.values.items():
            assert metric in METRICS
            assert not is_blank(value) or metric.endswith(("_hertz", "_bytes"))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(DEFAULT)), st.binary(max_size=3))
def test_a_real_page_cut_and_hurt_anywhere(position: int, hurt: bytes) -> None:
    body = DEFAULT.encode()
    text = (body[:position] + hurt + body[position + len(hurt) :])[: position + 500].decode(
        "utf-8", "replace"
    )
    page = read_page(text)
    assert all(metric in METRICS for gpu in page.gpus.values() for metric in gpu.values)
