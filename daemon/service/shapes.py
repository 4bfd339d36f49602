"""The API's bodies and answers, as OpenAPI shows them. Times are ISO 8601 in UTC."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f]+$")]
DeviceName = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f]+$")]
Text = Annotated[str, StringConstraints(max_length=4000)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Level = Literal["healthy", "watch", "warning", "critical"]


class Body(BaseModel):
    """A request body: unknown fields are an error, so that a misspelt one is not silently without effect."""

    model_config = ConfigDict(extra="forbid")


class ProblemDocument(BaseModel):
    """RFC 9457. `field` names what in the request was wrong."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    field: str | None = None


class IngestAnswer(BaseModel):
    stream: str
    sequence: int
    duplicate: bool = False


class RiskRow(BaseModel):
    """One device. `risk`: horizon in seconds to the probability of failure within it."""

    device: str
    node: str
    kind: str
    model: str
    serial: str
    simulated: bool
    risk: dict[str, float]
    max_risk: float
    level: Level
    reason: str


class RiskPage(BaseModel):
    items: list[RiskRow]
    next: str | None = None
    time: datetime | None = None
    """When this risk was computed."""


class ReasonRow(BaseModel):
    text: str
    feature: str
    value: float | None
    since: datetime | None
    contribution: float | None
    """In log odds; null for a rule, which is certain of itself."""
    evidence: dict[str, Any]


class EventRow(BaseModel):
    id: int
    time: datetime
    node: str
    device: str
    kind: str
    code: str
    severity: str
    action: str
    message: str
    pci: str | None
    count: int


class RiskPoint(BaseModel):
    time: datetime
    risk: dict[str, float]


class Value(BaseModel):
    value: float
    time: datetime


class Series(BaseModel):
    metric: str
    times: list[datetime]
    values: list[float | None]


class RiskDetail(RiskRow):
    reasons: list[ReasonRow]
    latest: dict[str, Value]
    events: list[EventRow]
    history: list[RiskPoint]
    series: list[Series]


class NodeSummary(BaseModel):
    node: str
    last_seen: datetime
    simulated: bool
    devices: int
    max_risk: float
    level: Level
    agent_version: str
    clock_skew_seconds: float


class NodePage(BaseModel):
    items: list[NodeSummary]
    next: str | None = None


class NodeDetail(NodeSummary):
    first_seen: datetime
    batches: int
    risks: list[RiskRow]
    events: list[EventRow]


class WebhookBody(Body):
    """`secret`: `whsec_` and base64; without it one is made and returned, once. `old_secret` signs as well, while keys
    rotate."""

    url: Annotated[str, StringConstraints(min_length=1, max_length=2048)]
    secret: Annotated[str, StringConstraints(pattern=r"^whsec_[A-Za-z0-9+/=]{32,128}$")] | None = None
    old_secret: Annotated[str, StringConstraints(pattern=r"^whsec_[A-Za-z0-9+/=]{32,128}$")] | None = None


class JobBody(Body):
    """What a job says of itself. Costs in seconds; `last_checkpoint` is when the last save was complete."""

    nodes: list[Name] = Field(default_factory=list, max_length=20_000)
    devices: list[DeviceName] = Field(default_factory=list, max_length=20_000)
    webhook: WebhookBody | None = None
    checkpoint_seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    restart_seconds: Seconds = 600.0
    swap_seconds: Seconds | None = None
    checkpoint_interval_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
    last_checkpoint: datetime | None = None
    gpus: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    dry_run: bool = False


class ProgressRow(BaseModel):
    """What a job's ranks tell of their steps. `devices`: those that stand out; a finding that names none is of the
    whole job: network, storage or data. `slowdown_score`: evidence of slower steps, 1 at its limit."""

    finding: Literal["fine", "straggler", "slow_job", "stalled"]
    reason: str
    since: datetime | None
    loss_finding: Literal["fine", "spike", "not_a_number"]
    loss_reason: str
    devices: list[str]
    nodes: list[str]
    ranks: int
    silent_ranks: int
    step: int | None
    iteration_seconds: float | None
    usual_iteration_seconds: float | None
    samples_per_second: float | None
    loss: float | None
    bad_losses: int
    in_marked_phase: bool
    slowdown_score: float
    last_report: datetime | None
    simulated: bool


class ProgressItem(ProgressRow):
    job: str
    registered: bool


class ProgressPage(BaseModel):
    items: list[ProgressItem]
    next: str | None = None


class JobRow(BaseModel):
    job: str
    nodes: list[str]
    devices: list[str]
    webhook_url: str
    webhook_disabled: str
    checkpoint_seconds: float
    measured_checkpoint_seconds: float | None
    restart_seconds: float
    swap_seconds: float | None
    checkpoint_interval_seconds: float | None
    last_checkpoint: datetime | None
    gpus: int | None
    dry_run: bool
    created: datetime
    updated: datetime
    progress: ProgressRow | None = None
    """Null when no rank of a job of this name reports its steps."""
    webhook_secret: str | None = None
    """Only in the answer that made it."""


class JobPage(BaseModel):
    items: list[JobRow]
    next: str | None = None


class Advice(BaseModel):
    """`interval_seconds`: from one save to the next. `trust_age_seconds`: a prediction is acted on when the last save
    is older."""

    job: str
    interval_seconds: float
    without_prediction_seconds: float
    mtbf_seconds: float
    mtbf_source: str
    checkpoint_seconds: float
    restart_seconds: float
    recall: float
    precision: float
    quality_source: str
    expected_effective_ratio: float
    trust_age_seconds: float
    why: str


class ProtectionRow(BaseModel):
    id: str
    job: str
    state: Literal["open", "accepted", "completed", "declined", "failed", "escalated", "dry_run"]
    action: Literal["checkpoint", "checkpoint_and_drain", "drain"]
    device: str
    devices: list[str]
    nodes: list[str]
    risk: dict[str, float]
    chance: float
    reasons: list[str]
    simulated: bool
    created: datetime
    deadline: datetime
    acknowledged: datetime | None
    closed: datetime | None
    escalated: datetime | None
    checkpoint: str | None
    step: int | None
    save_seconds: float | None
    answer: str


class ProtectionPage(BaseModel):
    items: list[ProtectionRow]
    next: str | None = None


class AckBody(Body):
    state: Literal["accepted", "completed", "declined", "failed"]
    checkpoint: Text | None = None
    step: Annotated[int, Field(ge=0, le=2**62)] | None = None
    duration_seconds: Seconds | None = None
    reason: Text | None = None


class Attempt(BaseModel):
    time: datetime
    status: int | None
    error: str
    seconds: float


class DeliveryRow(BaseModel):
    id: str
    protection: str
    job: str
    url: str
    state: Literal["waiting", "delivered", "dead", "answered"]
    attempts: int
    created: datetime
    deadline: datetime
    next_attempt: datetime | None
    finished: datetime | None
    last_status: int | None
    last_error: str
    log: list[Attempt]


class DeliveryPage(BaseModel):
    items: list[DeliveryRow]
    next: str | None = None


class EventPage(BaseModel):
    items: list[EventRow]
    next: str | None = None


class AlertRow(BaseModel):
    id: int
    key: str
    level: str
    title: str
    reason: str
    device: str
    node: str
    job: str
    simulated: bool
    created: datetime
    updated: datetime
    acknowledged: datetime | None
    acknowledged_by: str
    resolved: datetime | None


class AlertPage(BaseModel):
    items: list[AlertRow]
    next: str | None = None


class SilenceBody(Body):
    """At least one of node, device and job. `ends` or `hours`."""

    node: Annotated[str, StringConstraints(max_length=255)] = ""
    device: Annotated[str, StringConstraints(max_length=512)] = ""
    job: Annotated[str, StringConstraints(max_length=255)] = ""
    starts: datetime | None = None
    ends: datetime | None = None
    hours: Annotated[float, Field(gt=0, le=24 * 366)] | None = None
    reason: Text = ""


class SilenceRow(BaseModel):
    id: int
    node: str
    device: str
    job: str
    starts: datetime
    ends: datetime
    reason: str
    created_by: str


class SilencePage(BaseModel):
    items: list[SilenceRow]
    next: str | None = None


class FailureBody(Body):
    """What really failed. `repaired`: the device has been reset, repaired or replaced; rules in force for it end."""

    device: DeviceName
    cause: Name
    time: datetime | None = None
    repaired: bool = False


class FailureRow(BaseModel):
    time: datetime
    node: str
    device: str
    cause: str
    new: bool


class ModelRow(BaseModel):
    name: str
    kind: str
    state: str
    digest: str
    horizons_s: list[int]
    simulated: bool
    created: str
    trained_from: str
    trained_to: str
    metrics: dict[str, float]
    error: str = ""


class ModelPage(BaseModel):
    items: list[ModelRow]
    next: str | None = None


class Health(BaseModel):
    status: Literal["ok"]
    version: str


class Readiness(BaseModel):
    status: Literal["ready"]
    devices: int
    cycle: int
    last_cycle: datetime | None
    cycle_seconds: float
    backlog_bytes: int
