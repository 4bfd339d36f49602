"""The service's own metrics for Prometheus, read when scraped. Those of the devices are the agents' to show."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forewarn.daemon.service.service import Service
from forewarn.daemon.service.view import LEVEL_FLOORS, LEVELS

RISK_SHOWN = 1000
"""Devices whose risk is exported: the riskiest ones above healthy. 80,000 series would tell nobody more."""


class ServiceCollector(Collector):
    """Gauges and counters of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._ingest()
        yield from self._fleet()
        yield from self._jobs()

    def _ingest(self) -> Iterator[Metric]:
        service = self._service
        counts = service.counts
        yield CounterMetricFamily("forewarn_ingest_batches", "Batches taken", value=counts.batches)
        yield CounterMetricFamily("forewarn_ingest_duplicates", "Batches sent again", value=counts.duplicates)
        yield CounterMetricFamily(
            "forewarn_ingest_refused", "Batches refused as invalid", value=counts.refused
        )
        yield CounterMetricFamily("forewarn_ingest_busy", "Batches put off with 429", value=counts.busy)
        yield CounterMetricFamily("forewarn_ingest_bytes", "Bytes taken, decompressed", value=counts.bytes)
        yield CounterMetricFamily("forewarn_ingest_samples", "Values taken", value=counts.samples)
        yield CounterMetricFamily(
            "forewarn_log_commits", "Group commits of the write-ahead log", value=service.journal.commits
        )
        yield CounterMetricFamily(
            "forewarn_log_bytes", "Bytes written to the write-ahead log", value=service.journal.written_bytes
        )
        yield GaugeMetricFamily(
            "forewarn_backlog_bytes", "Batches taken and not yet applied", value=service.engine.backlog_bytes
        )
        yield GaugeMetricFamily(
            "forewarn_apply_lag_seconds",
            "Time from receipt to the fleet's state",
            value=service.engine.last_apply_lag_s,
        )
        yield CounterMetricFamily(
            "forewarn_archive_rows", "Rows written to the Parquet history", value=service.archive.rows
        )
        yield CounterMetricFamily(
            "forewarn_webhooks_delivered", "Webhooks answered with success", value=service.outbox.delivered
        )
        yield CounterMetricFamily(
            "forewarn_webhooks_failed", "Webhook attempts that failed", value=service.outbox.failed
        )

    def _fleet(self) -> Iterator[Metric]:
        view = self._service.engine.view
        yield GaugeMetricFamily(
            "forewarn_nodes", "Nodes that have reported", value=len(self._service.engine.nodes)
        )
        yield GaugeMetricFamily(
            "forewarn_cycle_seconds",
            "Duration of the last scoring cycle",
            value=self._service.engine.last_cycle_s,
        )
        yield GaugeMetricFamily(
            "forewarn_cycle_timestamp_seconds", "When the last scoring cycle was", value=view.time
        )
        devices = GaugeMetricFamily("forewarn_devices", "Devices by kind and level", labels=["kind", "level"])
        for kind in view.kinds:
            part = view.decisive[kind.first_row : kind.first_row + len(kind.devices)]
            levels = np.searchsorted(LEVEL_FLOORS, part, side="right") - 1
            for number, name in enumerate(LEVELS):
                devices.add_metric([kind.kind, name], int((levels == number).sum()))
        yield devices
        risk = GaugeMetricFamily(
            "forewarn_risk_ratio",
            "Probability of failure within the horizon, of devices above healthy",
            labels=["device", "node", "kind", "horizon_seconds", "simulated"],
        )
        for row in view.order[:RISK_SHOWN]:
            if view.worst[row] < LEVEL_FLOORS[1]:
                break
            shown = view.row(int(row))
            for horizon, chance in shown["risk"].items():
                risk.add_metric(
                    [shown["device"], shown["node"], shown["kind"], horizon, str(shown["simulated"]).lower()],
                    chance,
                )
        yield risk

    def _jobs(self) -> Iterator[Metric]:
        states = self._service.engine.view.jobs.values()
        step = GaugeMetricFamily("forewarn_job_iteration_seconds", "Time of a training step", labels=["job"])
        usual = GaugeMetricFamily(
            "forewarn_job_usual_iteration_seconds", "Usual time of a training step", labels=["job"]
        )
        score = GaugeMetricFamily(
            "forewarn_job_slowdown_score", "Evidence of slower steps, 1 at its limit", labels=["job"]
        )
        trouble = GaugeMetricFamily(
            "forewarn_job_trouble", "1 for what is found of a training job", labels=["job", "finding"]
        )
        for state in states:
            if state.iteration_s is not None:
                step.add_metric([state.job], state.iteration_s)
            if state.usual_iteration_s is not None:
                usual.add_metric([state.job], state.usual_iteration_s)
            score.add_metric([state.job], state.slowdown_score)
            for finding in (state.finding, state.loss_finding):
                if finding != "fine":
                    trouble.add_metric([state.job, finding], 1)
        yield from (step, usual, score, trouble)


def exposition(service: Service) -> bytes:
    """The page for Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServiceCollector(service))
    return bytes(generate_latest(registry))
