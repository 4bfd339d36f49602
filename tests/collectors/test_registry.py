"""Making collectors by name: options from text or TOML, and errors that name what is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forewarn.collectors import registry
from forewarn.collectors.base import Reading
from forewarn.collectors.errors import ConfigError


class Probe:
    """A collector with one option of each type."""

    name, interval_s, deadline_s = "probe", 1.0, 1.0

    def __init__(
        self,
        setup: registry.Setup,
        *,
        url: str,
        path: Path = Path("/dev/null"),
        count: int = 1,
        ratio: float = 0.5,
        on: bool = False,
        names: list[str] | None = None,
        types: dict[str, str] | None = None,
    ) -> None:
        self.options = {k: v for k, v in locals().items() if k not in ("self", "setup")}

    def collect(self) -> Reading:
        return Reading()

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.COLLECTORS, "probe", f"{__name__}:Probe")
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())


def _this_module() -> Any:
    import types

    module = types.ModuleType(__name__)
    module.__dict__["Probe"] = Probe
    return module


def option(key: str, value: Any) -> Any:
    made: Any = registry.create("probe", {"url": "u", key: value})
    return made.options[key]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("url", "http://x", "http://x"),
        ("path", "/a/b", Path("/a/b")),
        ("count", "7", 7),
        ("ratio", "0.25", 0.25),
        ("on", "true", True),
        ("names", "sda, sdb,", ["sda", "sdb"]),
        ("names", ["sda"], ["sda"]),
        ("types", "sda=sat,sdb=megaraid+0", {"sda": "sat", "sdb": "megaraid+0"}),
        ("types", {"sda": "sat"}, {"sda": "sat"}),
        ("count", 7, 7),
    ],
)
def test_options_from_text_and_toml(key: str, text: Any, value: Any) -> None:
    assert option(key, text) == value


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("nvlm", {}, ["nvlm", "nvml"]),
        ("probe", {"url": "u", "uri": "x"}, ["uri", "url", "path"]),
        ("probe", {"url": "u", "count": "many"}, ["count", "many"]),
        ("probe", {"url": "u", "on": "perhaps"}, ["on", "perhaps"]),
        ("probe", {"url": "u", "types": "sda"}, ["types", "sda"]),
        ("probe", {"url": "u", "path": 7}, ["path", "7"]),
        ("probe", {}, ["url", "must be set"]),
    ],
)
def test_what_is_wrong_is_named(name: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.create(name, options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_package_names_it_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.COLLECTORS, "other", "a_package_that_is_not_installed:Collector")
    with pytest.raises(ConfigError, match=r"a_package_that_is_not_installed.*forewarn\[agent\]"):
        registry.create("other", {})
