"""Settings from file and environment; every mistake is named with its place and the way out."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from forewarn.collectors.errors import ConfigError
from forewarn.daemon import config
from forewarn.daemon.config import Config


def load(tmp_path: Path, text: str, **environment: str) -> Config:
    path = tmp_path / "forewarn.toml"
    path.write_text(text)
    return config.load(path, environment)


def test_defaults_without_a_file() -> None:
    assert config.load(None, {}) == Config()


def test_the_environment_is_stronger_than_the_file_and_the_file_than_the_default(tmp_path: Path) -> None:
    text = '[agent]\nnode = "file"\nspool = "/from/file"\n'
    told = load(tmp_path, text, FOREWARN_AGENT_NODE="environment", UNRELATED="x")
    assert (told.agent.node, told.agent.spool, told.agent.listen) == (
        "environment",
        "/from/file",
        "127.0.0.1:8421",
    )


def test_collectors_take_options(tmp_path: Path) -> None:
    text = "[agent.collectors.nvml]\ninterval_s = 5\n[agent.collectors.smart.options]\ndevices = ['sda']\n"
    collectors = load(tmp_path, text, FOREWARN_AGENT_COLLECTORS_KERNEL_LOG_ENABLED="false").agent.collectors
    assert collectors["nvml"].interval_s == 5
    assert collectors["smart"].options == {"devices": ["sda"]}
    assert collectors["kernel_log"].enabled is False


def test_options_from_the_environment() -> None:
    told = config.load(None, {"FOREWARN_AGENT_COLLECTORS_SMART_OPTIONS_SMARTCTL": "/opt/smartctl"})
    assert told.agent.collectors["smart"].options == {"smartctl": "/opt/smartctl"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[agent]\nnode = 'n'\nspol = 'x'\n", ["forewarn.toml:3", "agent.spol", "did you mean 'spool'"]),
        ("[agnet]\n", ["forewarn.toml:1", "agnet", "agent"]),
        ("[agent]\nzzz = 1\n", ["known keys", "service_url"]),
        ("[agent]\nship_interval_s = 'soon'\n", ["forewarn.toml:2", "ship_interval_s"]),
        ("[agent.collectors.nvml]\nintervall_s = 3\n", ["agent.collectors.nvml.intervall_s", "interval_s"]),
        ("[agent\n", ["not valid TOML"]),
        ("agent = 3\n", ["agent"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FOREWARN_AGENT_SPOL", "x", ["FOREWARN_AGENT_SPOL"]),
        ("FOREWARN_AGNET", "x", ["FOREWARN_AGNET", "agent"]),
        ("FOREWARN_AGENT", "x", ["section"]),
        ("FOREWARN_AGENT_SPOOL_MAX_BYTES", "much", ["FOREWARN_AGENT_SPOOL_MAX_BYTES", "much"]),
        ("FOREWARN_SERVICE_LISTEN_PORT", "1", ["FOREWARN_SERVICE_LISTEN_PORT", "service.listen"]),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(name: str, value: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, {name: value})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_and_an_unreadable_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        config.load(tmp_path / "none.toml", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path, {})
    (tmp_path / "latin").write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path / "latin", {})


def test_secrets_come_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" secret \n")
    assert config.read_secret("T", str(file), {}) == "secret"
    assert config.read_secret("T", str(file), {"T": "stronger"}) == "stronger"
    assert config.read_secret("T", "", {}) == ""
    with pytest.raises(ConfigError, match="none"):
        config.read_secret("T", str(tmp_path / "none"), {})


@pytest.mark.parametrize(
    ("address", "pair"),
    [("127.0.0.1:8420", ("127.0.0.1", 8420)), ("[::1]:0", ("::1", 0)), ("host:65535", ("host", 65535))],
)
def test_addresses(address: str, pair: tuple[str, int]) -> None:
    assert config.parse_address(address, "k") == pair


@pytest.mark.parametrize("address", ["", "8420", ":8420", "host:", "host:x", "host:65536", "host:-1"])
def test_a_wrong_address_names_its_key(address: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.listen"):
        config.parse_address(address, "agent.listen")


def test_every_setting_is_documented() -> None:
    """A setting without words beside it is one that nobody will find."""
    import ast
    import inspect

    plain = {
        "enabled",
        "listen",
        "data",
        "job",
        "service_url",
        "collectors",
        "agent",
        "service",
        "controller",
    }
    for node in ast.parse(inspect.getsource(config)).body:
        if not (isinstance(node, ast.ClassDef) and node.name.endswith("Config")):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and field.target.id not in plain
            ):
                assert isinstance(after, ast.Expr), f"{node.name}.{field.target.id} has no docstring"


def test_sections_know_their_fields() -> None:
    assert all(issubclass(t, msgspec.Struct) for n, t in config.fields_of(Config).items() if n != "log_level")
