"""Progress of all training jobs: the ranks' samples in, one finding a job out, and what is told of it when it changes.

Owned by the thread that owns the fleet. No I/O: what is told are batches, which go through the log like those of
agents, so that events, rules and history know of them and a replay does as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from forewarn.collectors.base import Device, Event
from forewarn.collectors.errors import StorageError
from forewarn.daemon import wire
from forewarn.daemon.service.intake import OWN_STREAM
from forewarn.daemon.service.times import iso
from forewarn.models.fleet import Reading
from forewarn.models.job_progress import Finding, JobProgress

HELD_S = 60.0
"""A finding is over when nothing was found for so long."""
FORGET_JOB_S = 24 * 3600.0
"""A job of which nothing was heard for so long is forgotten."""
MAX_JOBS = 10_000
MAX_NAMED = 8
"""Ranks that events are told for."""
MARKER = "training_step_total"
"""The metric that every rank gives."""
PREFIX = "training_"

_LOCAL = re.compile(r"(?:(?P<job>.+)\.)?rank(?P<rank>\d+)")
_GPU = re.compile(r"gpu\d+")
GPUS_A_NODE = 32
"""Places that are looked at for a UUID."""
_EVENTS = {
    "slow_job": ("job_slow", "warning"),
    "straggler": ("job_straggler", "warning"),
    "stalled": ("job_stalled", "error"),
}
_RECOVERED = {"slow_job": "slow", "straggler": "straggler", "stalled": "stalled"}

Described = Callable[[str], Device | None]


class JobState(msgspec.Struct, frozen=True):
    """A job as of one cycle. Times are seconds since the epoch; None where nothing is known.

    `finding` is that of `Finding.kind`; `devices` and `nodes` are those that stand out, GPUs where a rank's is known.
    """

    job: str
    time: float
    finding: str = "fine"
    reason: str = ""
    since: float | None = None
    loss_finding: str = "fine"
    loss_reason: str = ""
    devices: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    ranks: int = 0
    silent_ranks: int = 0
    step: int | None = None
    iteration_s: float | None = None
    usual_iteration_s: float | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    bad_losses: int = 0
    in_marked_phase: bool = False
    slowdown_score: float = 0.0
    last_report: float | None = None
    simulated: bool = False


class _Rank(msgspec.Struct):
    """Where a rank runs: its job and its name there; the ids of its own device and of its GPU ("": not known)."""

    job: str
    name: str
    node: str
    device: str
    gpu: str = ""


class _Told(msgspec.Struct):
    """A finding in force. `devices`: those it was told for, and when each was last found to be concerned; `accused`
    says that they stand out, and are not merely where a finding on the whole job is told."""

    kind: str = "fine"
    reason: str = ""
    since: float = 0.0
    devices: dict[str, float] = {}
    accused: bool = False


class _Job(msgspec.Struct):
    progress: JobProgress
    told: _Told
    loss: _Told
    seen: float = 0.0
    simulated: bool = False


class JobsProgress:
    """`take` what nodes sent, `judge` once a cycle."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._ranks: dict[str, _Rank] = {}
        """By device id, `NODE/JOB.rank3`."""
        self._of_node: dict[str, set[str]] = {}
        self._numbers: dict[str, int] = {}

    def take(
        self, node: str, readings: Sequence[Reading], described: Described, shift_s: float = 0.0
    ) -> list[str]:
        """Take in a batch; returns the devices of ranks that are gone."""
        gone: list[str] = []
        for reading in readings:
            if MARKER not in reading.metrics:
                continue
            names = [m.startswith(PREFIX) for m in reading.metrics]
            present: set[str] = set()
            for device, row in zip(reading.devices, reading.values.tolist(), strict=True):
                rank = self._rank_of(node, device, described)
                if rank is None:
                    continue
                present.add(device)
                samples = {
                    m: v for m, v, ours in zip(reading.metrics, row, names, strict=True) if ours and v == v
                }
                self._observe(rank, samples, reading.time + shift_s, described(device))
            # A node tells all its ranks at once: one that it leaves out has ended.
            left = self._of_node.get(node, set()) - present
            gone += left
            for device in left:
                self._forget(device)
            self._of_node[node] = present
        return gone

    def _rank_of(self, node: str, device: str, described: Described) -> _Rank | None:
        known = self._ranks.get(device)
        if known is not None:
            if not known.gpu:
                known.gpu = _gpu_of(node, described(device), described)
            return known
        found = _LOCAL.fullmatch(device.partition("/")[2])
        if found is None:
            return None
        job = found["job"] or f"unnamed@{node}"
        if job not in self._jobs:
            if len(self._jobs) >= MAX_JOBS:
                return None
            self._jobs[job] = _Job(JobProgress(), _Told(), _Told())
        rank = _Rank(job, f"rank {found['rank']} on {node}", node, device)
        rank.gpu = _gpu_of(node, described(device), described)
        self._ranks[device] = rank
        return rank

    def _observe(self, rank: _Rank, samples: Mapping[str, float], time: float, device: Device | None) -> None:
        job = self._jobs[rank.job]
        job.seen = max(job.seen, time)
        role = ""
        if device is not None:
            role, job.simulated = device.labels.get("role", ""), device.simulated
        job.progress.observe(rank.name, samples, time, role)

    def _forget(self, device: str) -> None:
        rank = self._ranks.pop(device, None)
        if rank is not None and rank.job in self._jobs:
            self._jobs[rank.job].progress.forget(rank.name)

    def judge(
        self, now: float, applied: Callable[[str], int]
    ) -> tuple[dict[str, JobState], list[wire.Batch]]:
        """What every job's progress says at `now`, and what is news of it, as a batch for each node concerned.

        `applied`: the highest sequence of OWN_STREAM that is known of a node, so that news continue it.
        """
        ranks_of: dict[str, dict[str, _Rank]] = {}
        for rank in self._ranks.values():
            ranks_of.setdefault(rank.job, {})[rank.name] = rank
        states: dict[str, JobState] = {}
        news: list[Event] = []
        for name, job in list(self._jobs.items()):
            if now - job.seen > FORGET_JOB_S:
                del self._jobs[name]
                continue
            ranks = ranks_of.get(name, {})
            found, loss = job.progress.judge(now), job.progress.judge_loss(now)
            news += self._changes(job.told, name, found.kind, found, ranks, job.progress, now)
            kind = "fine" if loss.state == "fine" else "loss"
            told_of_loss = Finding("fine", loss.ranks, loss.reason)
            news += self._changes(job.loss, name, kind, told_of_loss, ranks, job.progress, now, loss.state)
            states[name] = _state(name, job, loss.state, now)
        return states, self._batches(news, now, applied)

    def _changes(
        self,
        told: _Told,
        job: str,
        kind: str,
        found: Finding,
        ranks: Mapping[str, _Rank],
        progress: JobProgress,
        now: float,
        code: str = "",
    ) -> list[Event]:
        """The events by which what was told becomes what is found; `told` is brought up to date."""
        events: list[Event] = []
        if kind not in ("fine", told.kind):
            events = _recovered(job, told, list(told.devices), now)
            told.kind, told.since, told.devices = kind, now, {}
        if kind != "fine":
            named = [ranks[r] for r in found.ranks[:MAX_NAMED] if r in ranks]
            devices = [r.gpu or r.device for r in named] or _witness(ranks, progress)
            told.reason, told.accused = f"{job}: {found.reason}", bool(named)
            event, severity = _EVENTS.get(kind, ("job_loss", "warning"))
            code = code if kind == "loss" else _code(found)
            events += [
                Event(d, event, code, severity, told.reason, time=now)
                for d in devices
                if d not in told.devices
            ]
            told.devices.update(dict.fromkeys(devices, now))
        over = [d for d, last in told.devices.items() if now - last > HELD_S]
        events += _recovered(job, told, over, now)
        for device in over:
            del told.devices[device]
        if not told.devices:
            told.kind, told.reason, told.accused = "fine", "", False
        return events

    def _batches(
        self, events: Sequence[Event], now: float, applied: Callable[[str], int]
    ) -> list[wire.Batch]:
        by_node: dict[str, list[Event]] = {}
        for event in events:
            by_node.setdefault(event.device.partition("/")[0], []).append(event)
        batches = []
        for node, mine in by_node.items():
            number = self._numbers[node] = max(self._numbers.get(node, 0), applied(node)) + 1
            batches.append(wire.Batch(node=node, stream=OWN_STREAM, sequence=number, sent=now, events=mine))
        return batches

    # Keeping -----------------------------------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """The state as plain values, for `of`."""
        jobs = {
            name: {
                "progress": job.progress.plain(),
                "told": msgspec.to_builtins(job.told),
                "loss": msgspec.to_builtins(job.loss),
                "seen": job.seen,
                "simulated": job.simulated,
            }
            for name, job in self._jobs.items()
        }
        return {"jobs": jobs, "ranks": [msgspec.to_builtins(r) for r in self._ranks.values()]}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> JobsProgress:
        """What `plain` gave. Raises StorageError when it is something else."""
        made = cls()
        try:
            for name, kept in plain["jobs"].items():
                made._jobs[name] = _Job(
                    JobProgress.of(kept["progress"]),
                    msgspec.convert(kept["told"], _Told),
                    msgspec.convert(kept["loss"], _Told),
                    float(kept["seen"]),
                    bool(kept["simulated"]),
                )
            for rank in msgspec.convert(plain["ranks"], list[_Rank]):
                if rank.job in made._jobs:
                    made._ranks[rank.device] = rank
                    made._of_node.setdefault(rank.node, set()).add(rank.device)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"the progress of jobs is not understood: {error}") from error
        return made


def _gpu_of(node: str, rank: Device | None, described: Described) -> str:
    """The id of the GPU that a rank says it runs on, by name or UUID; "" when no such GPU of its node is known."""
    gpu = "" if rank is None else rank.labels.get("gpu", "")
    if not gpu:
        return ""
    if _GPU.fullmatch(gpu):
        return f"{node}/{gpu}" if described(f"{node}/{gpu}") is not None else ""
    wanted = gpu.removeprefix("GPU-").lower()
    for number in range(GPUS_A_NODE):
        found = described(f"{node}/gpu{number}")
        if found is not None and found.serial.removeprefix("GPU-").lower() == wanted:
            return f"{node}/gpu{number}"
    return ""


def _witness(ranks: Mapping[str, _Rank], progress: JobProgress) -> list[str]:
    """Where to tell what concerns the whole job: at the first rank that is known."""
    return next(([ranks[r].device] for r in progress.ranks if r in ranks), [])


def _code(found: Finding) -> str:
    if found.kind == "straggler":
        return "compute"
    if found.kind == "stalled":
        return "silent" if found.silent else "rank" if found.ranks else "job"
    return "job"


def _recovered(job: str, told: _Told, devices: Sequence[str], now: float) -> list[Event]:
    code = _RECOVERED.get(told.kind, "loss")
    text = f"{job}: over: {told.reason.removeprefix(f'{job}: ')}"
    return [Event(d, "job_recovered", code, "info", text, time=now) for d in devices]


def _state(name: str, job: _Job, loss: str, now: float) -> JobState:
    progress, told = job.progress, job.told
    devices = tuple(dict.fromkeys(d for t in (told, job.loss) if t.accused for d in t.devices))
    return JobState(
        job=name,
        time=now,
        finding=told.kind,
        reason=told.reason,
        since=told.since if told.kind != "fine" else None,
        loss_finding=loss,
        loss_reason=job.loss.reason if job.loss.kind != "fine" else "",
        devices=devices,
        nodes=tuple(dict.fromkeys(d.partition("/")[0] for d in devices)),
        ranks=len(progress.ranks),
        silent_ranks=len(progress.silent(now)),
        step=progress.step,
        iteration_s=progress.iteration_s,
        usual_iteration_s=progress.median_s,
        samples_per_second=progress.samples_per_second,
        loss=progress.loss,
        bad_losses=progress.bad_losses,
        in_marked_phase=progress.is_marked,
        slowdown_score=progress.sensitive,
        last_report=job.seen or None,
        simulated=job.simulated,
    )


def shown(state: JobState | None) -> dict[str, Any] | None:
    """A job's progress as the API shows it."""
    if state is None:
        return None
    return {
        "finding": state.finding,
        "reason": state.reason,
        "since": iso(state.since),
        "loss_finding": state.loss_finding,
        "loss_reason": state.loss_reason,
        "devices": list(state.devices),
        "nodes": list(state.nodes),
        "ranks": state.ranks,
        "silent_ranks": state.silent_ranks,
        "step": state.step,
        "iteration_seconds": state.iteration_s,
        "usual_iteration_seconds": state.usual_iteration_s,
        "samples_per_second": state.samples_per_second,
        "loss": state.loss,
        "bad_losses": state.bad_losses,
        "in_marked_phase": state.in_marked_phase,
        "slowdown_score": round(state.slowdown_score, 4),
        "last_report": iso(state.last_report),
        "simulated": state.simulated,
    }
