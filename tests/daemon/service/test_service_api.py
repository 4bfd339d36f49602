"""The API as a whole: pages, filters, errors, roles, documents; and its data structures by themselves."""

from __future__ import annotations

import itertools
import json
import logging
import random
import sqlite3
import stat
import string
import time
from io import StringIO
from pathlib import Path
from typing import Any

import alembic.autogenerate
import alembic.migration
import httpx
import numpy as np
import pytest
import structlog

from forewarn.collectors.base import Device
from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import InputError
from forewarn.daemon.cli import main
from forewarn.daemon.service import schema, server, tokens
from forewarn.daemon.service.alerts import DeviceAlerts
from forewarn.daemon.service.database import FILE_NAME, open_database
from forewarn.daemon.service.silences import Silence, Silences
from forewarn.daemon.service.view import (
    Query,
    View,
    level_of,
    make_view,
    past_of,
    raised,
    read_cursor,
    select,
    write_cursor,
)
from forewarn.models.fleet import RiskTable
from service_bench import Bench, Starter, batch, eventually, make_settings, xid


def view_of(risks: dict[str, list[float]], number: int = 1, kind: str = "gpu") -> View:
    devices = list(risks)
    risk = np.array([risks[d] for d in devices], np.float32).reshape(len(devices), 3)
    table = RiskTable(0.0, kind, devices, (900, 3600, 86400), risk, risk, np.zeros_like(risk))
    described = {d: Device(d, kind, simulated=d.startswith("sim")) for d in devices}
    return make_view(number, float(number), {kind: table}, described)[0]


# Views ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_pages_show_every_device_once_by_falling_risk(seed: int) -> None:
    chance = random.Random(seed)
    risks = {
        f"n{i}/gpu{j}": sorted(chance.choice([0.0, 0.1, 0.1, 0.5, chance.random()]) for _ in range(3))
        for i, j in itertools.product(range(20), range(4))
    }
    view = view_of(risks)
    for horizon in (None, 900, 86400):
        after, seen = None, []
        while True:
            rows, after = select(view, Query(limit=7, after=after, horizon_s=horizon))
            seen += [view.devices[r] for r in rows]
            if after is None:
                break
            after = tuple(read_cursor(write_cursor(*after), float, str))
        at = {None: 2, 900: 0, 86400: 2}[horizon]
        assert seen == [d for _, d in sorted((-np.float32(r[at]), d) for d, r in risks.items())]


def test_filters_of_a_view() -> None:
    view = view_of({"a/gpu0": [0.1, 0.2, 0.3], "a/gpu1": [0.0, 0.0, 0.6], "b/gpu0": [0.4, 0.5, 0.5]})

    def names(**query: Any) -> list[str]:
        return [view.devices[r] for r in select(view, Query(**query))[0]]

    assert names() == ["a/gpu1", "b/gpu0", "a/gpu0"]
    assert names(node="a") == ["a/gpu1", "a/gpu0"]
    assert names(node="a", device="b/gpu0") == []
    assert names(kind="disk") == []
    assert names(min_risk=0.5) == ["a/gpu1", "b/gpu0"]
    assert names(min_risk=0.05, horizon_s=900) == ["b/gpu0", "a/gpu0"]
    assert names(devices=frozenset({"a/gpu0", "nowhere"})) == ["a/gpu0"]


def test_raising_a_view_leaves_the_old_one_alone() -> None:
    view = view_of({"a/gpu0": [0.1, 0.2, 0.3], "a/gpu1": [0.0, 0.0, 0.6]})
    after = raised(view, {"a/gpu0": ((0.99, 0.99, 0.99), "broken"), "gone/gpu0": ((1.0,), "x")})
    assert view.risks("a/gpu0") == pytest.approx({900: 0.1, 3600: 0.2, 86400: 0.3})
    assert after.risks("a/gpu0") == pytest.approx({900: 0.99, 3600: 0.99, 86400: 0.99})
    node = after.node("a")
    assert node is not None and node.level == "critical" and node.devices == 2
    assert after.row(0)["reason"] == "broken"
    assert [after.devices[int(r)] for r in after.order] == ["a/gpu0", "a/gpu1"]


def test_what_is_kept_of_the_past_is_small_and_right() -> None:
    past = past_of(view_of({"a/gpu0": [0.1, 0.2, 0.3]}))
    assert past.risks("a/gpu0") == pytest.approx({900: 0.1, 3600: 0.2, 86400: 0.3}, abs=1e-3)
    assert past.risks("b/gpu0") == {}


@pytest.mark.parametrize(
    "text", ["", "!", "AAAA", write_cursor("a"), write_cursor(True, "a"), write_cursor(1, 2)]
)
def test_a_cursor_that_is_none_of_ours_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="cursor"):
        read_cursor(text, float, str)


@pytest.mark.parametrize(
    ("risk", "level"),
    [(0.0, "healthy"), (0.05, "watch"), (0.2, "warning"), (0.49, "warning"), (1.0, "critical")],
)
def test_levels(risk: float, level: str) -> None:
    assert level_of(risk) == level


# Alerts --------------------------------------------------------------------------------------------------------------


def levels_through(risks: list[float], silences: Silences | None = None) -> list[str]:
    """What is open for one device after each cycle."""
    alerts, out = DeviceAlerts(), []
    for number, risk in enumerate(risks, 1):
        alerts.step(view_of({"a/gpu0": [risk, risk, risk]}, number), silences or Silences())
        out.append(alerts.open.get("risk:a/gpu0", ""))
    return out


def test_an_alert_needs_two_of_three_cycles_and_stays_until_half() -> None:
    assert levels_through([0.3, 0.0, 0.0, 0.3]) == ["", "", "", ""]
    assert levels_through([0.3, 0.0, 0.3]) == ["", "", "warning"]
    assert levels_through([0.3, 0.3, 0.15, 0.11, 0.09]) == ["", "warning", "warning", "warning", ""]
    assert levels_through([0.3, 0.3, 0.6, 0.6]) == ["", "warning", "warning", "critical"]
    assert levels_through([0.95]) == ["critical"]


def test_a_silenced_device_raises_nothing() -> None:
    quiet = Silences([Silence("a", "", "", 0.0, 100.0)])
    assert levels_through([0.95, 0.95], quiet) == ["", ""]
    assert levels_through([0.95], Silences([Silence("b", "", "", 0.0, 100.0)])) == ["critical"]
    assert levels_through([0.95], Silences([Silence("a", "", "", 50.0, 100.0)])) == ["critical"]


# API -----------------------------------------------------------------------------------------------------------------


def test_every_error_is_a_problem_document(bench: Bench) -> None:
    operator = bench.headers(bench.operator)
    answers = {
        404: [
            bench.client.get("/nowhere"),
            bench.client.get("/v1/risk/n9/gpu0"),
            bench.client.get("/v1/nodes/n9"),
            bench.client.get("/v1/jobs/none"),
            bench.client.get("/v1/jobs/none/advice"),
            bench.client.get("/v1/risk", params={"job": "none"}),
            bench.post("/v1/protections/none/ack", {"state": "completed"}),
            bench.post("/v1/deliveries/none/retry"),
            bench.post("/v1/alerts/99/acknowledge"),
        ],
        405: [bench.client.delete("/v1/risk"), bench.client.get("/v1/ingest")],
        422: [
            bench.client.get("/v1/risk", params={"limit": "many"}),
            bench.client.get("/v1/risk", params={"min_risk": "nan"}),
            bench.client.get("/v1/events", params={"cursor": "x"}),
            bench.client.put("/v1/jobs/j", content=b"{", headers=operator),
            bench.put_job(checkpoint_secs=3),
            bench.put_job(nodes=[], devices=[]),
            bench.put_job(webhook={"url": "http://8.8.8.8/"}),
            bench.put_job(webhook={"url": "https://169.254.169.254/"}),
            bench.put_job(last_checkpoint="2999-01-01T00:00:00Z"),
            bench.post("/v1/silences", {"hours": 1}),
            bench.post("/v1/failures", {"device": "n1/gpu0", "cause": ""}),
        ],
        401: [
            bench.client.put("/v1/jobs/j", json={"nodes": ["n1"]}),
            bench.client.get("/v1/risk", headers={"Authorization": "Bearer wrong"}),
            bench.client.get("/v1/risk", headers={"Authorization": "Basic eA=="}),
        ],
        403: [
            bench.client.put("/v1/jobs/j", json={"nodes": ["n1"]}, headers=bench.headers(bench.reader)),
            bench.client.get("/v1/risk", headers=bench.headers(bench.agent)),
        ],
        413: [bench.client.put("/v1/jobs/j", content=bytes(5_000_000), headers=operator)],
    }
    for status, found in answers.items():
        for answer in found:
            assert answer.status_code == status, (answer.request.url, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["status"] == status
            assert answer.json()["detail"]


def test_reading_without_a_token_is_for_this_machine_alone(start: Starter) -> None:
    bench = start(anonymous_read=False)
    assert bench.client.get("/v1/risk").status_code == 401
    assert bench.client.get("/v1/risk", headers=bench.headers(bench.reader)).status_code == 200
    assert bench.client.get("/metrics").status_code == 401
    assert bench.client.get("/healthz").status_code == 200


def test_a_name_that_was_bound_to_loopback_reads_nothing(bench: Bench) -> None:
    assert bench.client.get("/v1/risk", headers={"Host": "evil.example.com"}).status_code == 401


def test_risk_nodes_and_events_of_a_small_fleet(bench: Bench) -> None:
    for i in range(3):
        bench.send(batch(f"n{i}", events=[xid(f"n{i}/gpu0", "63")]))
    bench.scored()
    page = bench.get("/v1/risk", limit=4)
    rest = bench.get("/v1/risk", limit=4, cursor=page["next"])
    names = [r["device"] for r in page["items"] + rest["items"]]
    assert len(names) == len(set(names)) >= 6
    assert all(r["simulated"] for r in page["items"] if r["kind"] == "gpu")
    assert bench.get("/v1/risk", node="n1", kind="gpu")["items"][0]["node"] == "n1"
    etag = bench.client.get("/v1/risk").headers["etag"]
    assert bench.client.get("/v1/risk", headers={"If-None-Match": etag}).status_code == 304
    nodes = bench.get("/v1/nodes", limit=2)
    assert [n["node"] for n in nodes["items"]] == ["n0", "n1"]
    assert [n["node"] for n in bench.get("/v1/nodes", cursor=nodes["next"])["items"]] == ["n2"]
    detail = bench.get("/v1/risk/n1/gpu0")
    assert detail["latest"]["gpu_temperature_celsius"]["value"] == 60.0
    assert detail["events"][0]["code"] == "63"
    eventually(lambda: len(bench.get("/v1/events")["items"]) == 3)
    first = bench.get("/v1/events", limit=2)
    second = bench.get("/v1/events", limit=2, cursor=first["next"])
    assert len({e["id"] for e in first["items"] + second["items"]}) == 3
    assert bench.get("/v1/events", node="n2")["items"][0]["device"] == "n2/gpu0"
    assert "forewarn_ingest_batches_total 3.0" in bench.client.get("/metrics").text


def test_a_job_its_advice_and_its_secret(bench: Bench) -> None:
    bench.send(batch())
    bench.scored()
    made = bench.put_job().json()
    assert made["webhook_secret"].startswith("whsec_")
    changed = bench.put_job(last_checkpoint="2026-01-01T00:00:00Z").json()
    assert changed["webhook_secret"] is None
    assert changed["last_checkpoint"] == "2026-01-01T00:00:00.000Z"
    # An older save does not take the place of a newer one.
    assert bench.put_job(last_checkpoint="2025-01-01T00:00:00Z").json()["last_checkpoint"] == (
        "2026-01-01T00:00:00.000Z"
    )
    assert "whsec" not in json.dumps(bench.get("/v1/jobs")) + json.dumps(bench.get("/v1/jobs/llm"))
    advice = bench.get("/v1/jobs/llm/advice")
    expected = (2 * advice["mtbf_seconds"] * 5.0 / (1 - advice["recall"])) ** 0.5
    assert advice["interval_seconds"] == pytest.approx(expected, rel=1e-6)
    assert bench.client.delete("/v1/jobs/llm", headers=bench.headers(bench.operator)).status_code == 204
    with bench.service.database.read() as run:
        log = [(r["action"], r["subject"]) for r in run.execute(schema.audit.select()).mappings()]
    assert log == [("job", "llm")] * 3 + [("job_removed", "llm")]


def test_a_repair_ends_the_rules_of_a_device(bench: Bench) -> None:
    bench.send(batch(events=[xid()]))
    bench.scored()
    assert bench.get("/v1/risk", device="n1/gpu1")["items"][0]["level"] == "critical"
    body = {"device": "n1/gpu1", "cause": "replaced", "repaired": True}
    assert bench.post("/v1/failures", body).json()["new"] is True
    bench.scored()
    assert bench.get("/v1/risk", device="n1/gpu1")["items"][0]["level"] == "healthy"


def test_live_messages(bench: Bench) -> None:
    with bench.client.stream("GET", "/v1/stream") as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("retry")
        bench.send(batch(events=[xid()]))
        for line in lines:
            if line == "event: event":
                assert json.loads(next(lines).removeprefix("data: "))["code"] == "79"
                break


def test_openapi_names_everything_and_documents_errors(bench: Bench) -> None:
    tree = bench.get("/openapi.json")
    for path in (
        "/v1/ingest", "/v1/risk", "/v1/risk/{device}", "/v1/nodes", "/v1/nodes/{node}", "/v1/jobs/{job}",
        "/v1/jobs/{job}/advice", "/v1/events", "/v1/alerts", "/v1/alerts/{id}/acknowledge", "/v1/silences",
        "/v1/protections", "/v1/protections/{id}/ack", "/v1/deliveries", "/v1/deliveries/{id}/retry",
        "/v1/models", "/v1/failures", "/healthz", "/readyz", "/metrics",
    ):  # fmt: skip
        assert path in tree["paths"], path
    text = json.dumps(tree)
    names = set(tree["components"]["schemas"])
    references = {r.split('"')[0] for r in text.split("#/components/schemas/")[1:]}
    assert references <= names
    assert "application/problem+json" in text


def test_headers_of_every_answer(bench: Bench) -> None:
    for path in ("/", "/v1/risk", "/nowhere"):
        headers = bench.client.get(path).headers
        assert "unsafe-inline" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_is_asked_makes_it_fail(bench: Bench, seed: int) -> None:
    """Random queries and bodies on every operation of the OpenAPI document: no answer from 500 on."""
    chance = random.Random(seed)
    bench.send(batch(events=[xid()]))
    bench.put_job()
    tree = bench.get("/openapi.json")
    odd: list[Any] = [
        "",
        "\x00",
        "n1",
        "n1/gpu0",
        "-1",
        "0",
        "1e400",
        "NaN",
        "%",
        "'\"",
        "é" * 300,
        "llm",
        None,
        [],
        {},
        -1,
        2**70,
        1e308,
        True,
        {"url": "x"},
        ["n1"],
        "2024-01-01",
        "9999-12-31T23:59:59Z",
    ]
    skipped = ("/v1/stream", "/v1/ingest")
    for path, operations in tree["paths"].items():
        if path in skipped:
            continue
        for method, operation in operations.items():
            for _ in range(8):
                query, place = {}, path
                for parameter in operation.get("parameters", []):
                    value = str(chance.choice(odd))
                    if parameter["in"] == "path":
                        place = place.replace(
                            f"{{{parameter['name']}}}", httpx.QueryParams({"v": value}).__str__()[2:]
                        )
                    elif chance.random() < 0.6:
                        query[parameter["name"]] = value
                body = None
                if "requestBody" in operation:
                    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                    fields = tree["components"]["schemas"][reference.rsplit("/", 1)[1]]["properties"]
                    body = {f: chance.choice(odd) for f in fields if chance.random() < 0.8}
                    body.update({"device": "n1/gpu0", "cause": "x"} if "cause" in fields else {})
                answer = bench.client.request(
                    method, place, params=query, headers=bench.headers(bench.operator),
                    content=None if body is None else json.dumps(body),
                )  # fmt: skip
                assert answer.status_code < 500 or answer.status_code == 503, (
                    method,
                    place,
                    query,
                    body,
                    answer.text,
                )


# Database, tokens, logs, commands -------------------------------------------------------------------------------------


def test_the_migrations_make_what_the_schema_says(tmp_path: Path) -> None:
    database = open_database(tmp_path)
    with database.engine.connect() as run:
        context = alembic.migration.MigrationContext.configure(run)
        assert alembic.autogenerate.compare_metadata(context, schema.metadata) == []
    database.close()
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600
    open_database(tmp_path).close()


def test_a_database_from_the_future_is_refused(tmp_path: Path) -> None:
    from forewarn.collectors.errors import StorageError

    open_database(tmp_path).close()
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    with pytest.raises(StorageError, match="newer Forewarn"):
        open_database(tmp_path)


def test_tokens_are_kept_as_digests(tmp_path: Path) -> None:
    database, clock = open_database(tmp_path), ManualClock()
    text = tokens.create(database, clock, "agent", node="n1", days=1)
    book = tokens.TokenBook(database, clock)
    book.refresh()
    assert book.find(text) == tokens.Principal(text.split("_")[1], "agent", "n1")
    for wrong in ("", "fwt", text[:-1], text + "x", text.replace("fwt_", "xxx_"), "fwt__", text.upper()):
        assert book.find(wrong) is None
    clock.advance(86401)
    assert book.find(text) is None
    database.close()
    assert text.split("_", 2)[2].encode() not in b"".join(p.read_bytes() for p in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"role": "king"}, "role"), ({"role": "agent"}, "node"), ({"role": "reader", "node": "n1"}, "node"),
     ({"role": "reader", "days": 0.0}, "days")],
)  # fmt: skip
def test_what_a_token_needs(tmp_path: Path, arguments: dict[str, Any], named: str) -> None:
    database = open_database(tmp_path)
    try:
        with pytest.raises(InputError, match=named):
            tokens.create(database, ManualClock(), **arguments)
    finally:
        database.close()


def test_the_token_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data", str(tmp_path)]
    assert main(["token", "create", *data, "--role", "agent", "--node", "n1", "--name", "first"]) == 0
    text = capsys.readouterr().out.strip()
    assert text.startswith("fwt_")
    assert main(["token", *data, "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["role"], row["node"], row["name"], row["revoked"]) == ("agent", "n1", "first", None)
    assert main(["token", "revoke", *data, row["id"]]) == 0
    assert main(["token", "revoke", *data, "unknown"]) == 1
    assert main(["token", "create", *data, "--role", "agent"]) == 1
    assert "node" in capsys.readouterr().err


def test_the_status_command(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.send(batch(events=[xid()]))
    bench.scored()
    assert main(["status", "--url", bench.url]) == 0
    shown = capsys.readouterr().out
    assert "n1/gpu1" in shown
    assert "critical" in shown
    assert main(["status", "--url", bench.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["risk"][0]["device"] == "n1/gpu1"
    assert main(["status", "--url", "http://127.0.0.1:9"]) == 1
    assert "forewarn serve" in capsys.readouterr().err


def test_secrets_never_reach_the_log() -> None:
    stream = StringIO()
    before = structlog.get_config()
    level, handlers = logging.root.level, list(logging.root.handlers)
    try:
        server.configure_logs("info", stream)
        noise = "".join(random.choices(string.ascii_letters, k=40))
        structlog.get_logger().info(
            "x", a=f"whsec_{noise}", b=f"fwt_0123456789ab_{noise}", c=f"Bearer {noise}", secret=noise
        )
    finally:
        structlog.configure(**before)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    assert noise not in stream.getvalue()
    assert json.loads(stream.getvalue())["event"] == "x"


def test_settings_name_what_is_wrong(tmp_path: Path) -> None:
    from forewarn.collectors.errors import ConfigError
    from forewarn.daemon.service.service import Service

    for fields, named in (
        ({"listen": "nowhere"}, "service.listen"),
        ({"models": str(tmp_path / "none")}, "service.models"),
        ({"database_url": "nosql://x"}, "service.database_url"),
        ({"allow_webhook_hosts": ["a/b"]}, "service.allow_webhook_hosts"),
    ):
        with pytest.raises(ConfigError, match=named):
            Service(make_settings(tmp_path, **fields))


def test_silent_nodes_are_reported(bench: Bench) -> None:
    bench.send(batch())
    bench.scored()
    bench.service.engine.nodes["n1"].last_seen = time.time() - 3600
    bench.service.reactor.tick()
    assert bench.get("/v1/alerts", node="n1")["items"][0]["title"] == "n1 is silent"
    bench.send(batch(sequence=2))
    bench.scored()
    bench.service.reactor.tick()
    assert bench.get("/v1/alerts", node="n1")["items"] == []
    assert bench.get("/v1/alerts", node="n1", state="resolved")["items"]
