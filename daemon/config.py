"""Settings: one TOML file, every key also in the environment as FOREWARN_SECTION_KEY. All are listed here.

Precedence: built-in default, then file, then environment. An unknown key is an error that names file, line,
key and the nearest known key. Secrets never stand in the file itself: `..._file` settings name where they are.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from forewarn.collectors.errors import ConfigError

ENVIRONMENT_PREFIX = "FOREWARN_"


class CollectorConfig(msgspec.Struct, forbid_unknown_fields=True):
    """[agent.collectors.NAME]: one collector. Options not listed here go to the collector itself."""

    enabled: bool = True
    interval_s: float | None = None
    """Seconds between polls; default: the collector's own."""
    deadline_s: float | None = None
    """Seconds after which a poll counts as hung; default: the collector's own."""
    options: dict[str, Any] = {}
    """What `forewarn collect NAME --set KEY=VALUE` sets: `path`, `smartctl`, `url`, ..."""


class AgentConfig(msgspec.Struct, forbid_unknown_fields=True):
    """[agent]: the program on each node."""

    node: str = ""
    """Name of this node; default: the host name up to the first dot."""
    service_url: str = "http://127.0.0.1:8420"
    """Where batches go."""
    token_file: str = ""
    """File that holds the agent's bearer token; FOREWARN_AGENT_TOKEN overrides it."""
    ca_file: str = ""
    """Certificates to trust for an https service_url; default: those of the system."""
    root: str = "/"
    """Folder in front of /proc, /sys and /dev: `/host` in a container that mounts them there."""
    spool: str = "/var/lib/forewarn/spool.db"
    """SQLite file in which batches wait until the service has them."""
    spool_max_bytes: int = 512 * 1024 * 1024
    """When the spool is larger, the oldest telemetry is given up first, events last; counted and reported."""
    listen: str = "127.0.0.1:8421"
    """Address of /metrics for Prometheus; empty: none."""
    ship_interval_s: float = 10.0
    """Seconds between batches; a critical event is shipped at once."""
    simulated: bool = False
    """Marks every device of this agent as simulated, wherever it is shown."""
    collectors: dict[str, CollectorConfig] = {}


class ServiceConfig(msgspec.Struct, forbid_unknown_fields=True):
    """[service]: the program at the centre."""

    listen: str = "127.0.0.1:8420"
    data: str = "/var/lib/forewarn"
    """Folder of the write-ahead log, snapshots, telemetry (Parquet) and the database."""
    database_url: str = ""
    """SQLAlchemy URL; default: SQLite inside `data`."""
    models: str = ""
    """Folder of models; default: those shipped with Forewarn."""
    cycle_interval_s: float = 10.0
    """Seconds between scoring cycles; a fatal event is acted on at once."""
    anonymous_read: bool = True
    """On loopback only: reading needs no token. Writing always needs one."""
    allow_webhook_hosts: list[str] = []
    """Hosts that webhooks may go to besides public https ones: names, addresses or networks (CIDR)."""
    allow_insecure_webhooks: bool = False
    """Allow http (not https) webhook URLs to hosts on the allow-list."""
    checkpoint_request_timeout_s: float = 120.0
    """A protection without acknowledgement for this long escalates to an alert."""
    cool_down_s: float = 900.0
    """The same devices ask a job to save again no sooner than this; a fatal event does not wait."""
    protect_dry_run: bool = False
    """Decide and record protections, but send no webhook."""
    public_url: str = ""
    """How controllers reach this service (for `ack_url` in webhooks); default: http://LISTEN."""
    segment_interval_s: float = 60.0
    """The write-ahead log is cut this often; what was cut becomes Parquet history."""
    segment_max_bytes: int = 64 * 1024 * 1024
    """It is cut sooner when it has grown this large."""
    snapshot_interval_s: float = 300.0
    """Seconds between snapshots of the fleet; a restart replays at most twice as much."""
    history_days: float = 30.0
    """Telemetry older than this is deleted; 0: kept for ever."""
    backlog_max_bytes: int = 256 * 1024 * 1024
    """Taken but not yet applied batches; above this agents are told to come back later (429)."""


class ControllerConfig(msgspec.Struct, forbid_unknown_fields=True):
    """[controller]: the receiver beside a training job."""

    listen: str = "127.0.0.1:8430"
    job: str = ""
    service_url: str = "http://127.0.0.1:8420"
    token_file: str = ""
    """File that holds the operator's bearer token for registering the job and acknowledging."""
    secret_file: str = ""
    """File that holds the webhook secret (`whsec_...`), one a line while keys rotate (the first registers);
    FOREWARN_CONTROLLER_SECRET overrides it."""
    nodes: list[str] = []
    """Nodes of the job. With these or `devices` the controller registers the job itself."""
    devices: list[str] = []
    """Devices of the job (`NODE/gpu3`), where it does not have whole nodes."""
    webhook_url: str = ""
    """Where the service reaches this receiver; default: http://LISTEN/webhook."""
    checkpoint_seconds: float = 60.0
    """What a save costs the job, until the service has measured it."""
    restart_seconds: float = 600.0
    """What a restart after a failure costs the job, besides the steps lost."""
    swap_seconds: float | None = None
    """What moving the job to a spare node takes; unset: there is no spare, so nothing but a save is asked."""
    dry_run: bool = False
    """The service decides and records for this job, and asks for nothing."""
    poll_interval_s: float = 0.0
    """Above 0: ask the service for protections as well, where no webhook can reach this receiver."""
    state: str = "/var/lib/forewarn/controller"
    """Folder that remembers webhook ids (none is acted on twice) and the save request for the loop."""


class Config(msgspec.Struct, forbid_unknown_fields=True):
    """All settings."""

    agent: AgentConfig = msgspec.field(default_factory=AgentConfig)
    service: ServiceConfig = msgspec.field(default_factory=ServiceConfig)
    controller: ControllerConfig = msgspec.field(default_factory=ControllerConfig)
    log_level: str = "info"
    """debug, info, warning or error."""


# Variables that other parts read themselves: secrets, which have no key in the file.
SECRET_VARIABLES = frozenset({"FOREWARN_AGENT_TOKEN", "FOREWARN_CONTROLLER_SECRET", "FOREWARN_TOKEN"})


def load(path: Path | None = None, environment: Mapping[str, str] | None = None) -> Config:
    """Read settings from `path` (None: defaults) and the environment. Raises ConfigError."""
    environment = os.environ if environment is None else environment
    tree: dict[str, Any] = {}
    text = ""
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
            tree = tomllib.loads(text)
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; give an existing one with --config") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
        _check_keys(tree, Config, (), path, text)
    for name, value in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in SECRET_VARIABLES:
            _apply_variable(tree, name, value)
    try:
        return msgspec.convert(tree, Config, strict=True)
    except msgspec.ValidationError as error:
        where = _where_of(str(error), path, text)
        raise ConfigError(f"{where}{error}") from error


def read_secret(variable: str, file: str, environment: Mapping[str, str] | None = None) -> str:
    """A secret from the environment or a file, without surrounding whitespace; empty when neither is set."""
    environment = os.environ if environment is None else environment
    if environment.get(variable):
        return environment[variable].strip()
    if not file:
        return ""
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{file}: the secret cannot be read: {error}") from error


def parse_address(address: str, key: str) -> tuple[str, int]:
    """`HOST:PORT` (IPv6 in brackets) as a pair. Raises ConfigError naming `key`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(f"{key}: {address!r} must be HOST:PORT, for example 127.0.0.1:8420")
    return host.strip("[]"), int(port)


def fields_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Names and resolved types of a settings section."""
    return dict(get_type_hints(struct).items())


def _inner(kind: Any) -> tuple[type[msgspec.Struct] | None, bool]:
    """The section a type holds, and whether it is a table of named sections."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind, False
    if get_origin(kind) is dict:
        value = get_args(kind)[1]
        if isinstance(value, type) and issubclass(value, msgspec.Struct):
            return value, True
    return None, False


def _check_keys(
    tree: dict[str, Any], struct: type[msgspec.Struct], trail: tuple[str, ...], path: Path, text: str
) -> None:
    known = fields_of(struct)
    for key, value in tree.items():
        here = (*trail, key)
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(sorted(known))}"
            raise ConfigError(f"{path}:{_line_of(key, text)}: unknown key {'.'.join(here)!r}{hint}")
        section, named = _inner(known[key])
        if section is None or not isinstance(value, dict):
            continue
        if named:
            for name, inner in value.items():
                if isinstance(inner, dict):
                    _check_keys(inner, section, (*here, name), path, text)
        else:
            _check_keys(value, section, here, path, text)


def _line_of(key: str, text: str) -> int:
    pattern = re.compile(rf"^\s*(?:\[[^\]]*\b{re.escape(key)}\b[^\]]*\]|[\"']?{re.escape(key)}[\"']?\s*[=.])")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.match(line):
            return number
    return 1


def _where_of(message: str, path: Path | None, text: str) -> str:
    """`file:line: ` of the key that a msgspec message names with `$.a.b`, as far as the file says."""
    found = re.search(r"`\$\.?([^`]*)`", message)
    if path is None or found is None:
        return ""
    key = found.group(1).split(".")[-1].split("[")[0]
    return f"{path}:{_line_of(key, text)}: " if key and key in text else ""


def _apply_variable(tree: dict[str, Any], name: str, value: str) -> None:
    words = name[len(ENVIRONMENT_PREFIX) :].lower()
    place: dict[str, Any] = tree
    struct: type[msgspec.Struct] = Config
    trail: list[str] = []
    while True:
        known = fields_of(struct)
        match = max((k for k in known if words == k or words.startswith(k + "_")), key=len, default=None)
        if match is None:
            raise ConfigError(
                f"{name}: names no setting; known below {'.'.join(trail) or 'the top'}: {', '.join(known)}"
            )
        section, named = _inner(known[match])
        trail.append(match)
        rest = words[len(match) + 1 :]
        if section is None:
            if rest:
                if get_origin(known[match]) is dict:
                    place.setdefault(match, {})[rest] = _parse_value(value, str, name, loose=True)
                    return
                raise ConfigError(f"{name}: names no setting; {'.'.join(trail)} has no parts")
            place[match] = _parse_value(value, known[match], name)
            return
        if not rest:
            raise ConfigError(
                f"{name}: {'.'.join(trail)} is a section; name a key of it: {', '.join(fields_of(section))}"
            )
        place = place.setdefault(match, {})
        if named:
            key = max((k for k in fields_of(section) if f"_{k}" in rest), key=len, default=None)
            if key is None:
                raise ConfigError(
                    f"{name}: names no setting below {'.'.join(trail)}: {', '.join(fields_of(section))}"
                )
            item, _, tail = rest.partition(f"_{key}")
            place = place.setdefault(item, {})
            trail.append(item)
            words = key + tail
        else:
            words = rest
        struct = section


def _parse_value(value: str, kind: Any, name: str, *, loose: bool = False) -> Any:
    """A variable's text as TOML would give it: strings need no quotes."""
    if kind is str and not loose:
        return value
    try:
        return tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        if loose:
            return value
        if get_origin(kind) is list:
            return [part.strip() for part in value.split(",") if part.strip()]
        raise ConfigError(f"{name}: {value!r} is not a valid value ({kind})") from None
