"""The collectors by name: the one line that registers a source."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from forewarn.collectors.base import Collector
from forewarn.collectors.clock import Clock, SystemClock
from forewarn.collectors.errors import ConfigError

COLLECTORS: dict[str, str] = {
    "nvml": "forewarn.collectors.nvml:NvmlCollector",
    "dcgm": "forewarn.collectors.dcgm:DcgmCollector",
    "smart": "forewarn.collectors.smart:SmartCollector",
    "kernel_log": "forewarn.collectors.kernel_log:KernelLogCollector",
    "fabric": "forewarn.collectors.fabric:FabricCollector",
    "host": "forewarn.collectors.host:HostCollector",
    "training": "forewarn.collectors.training:TrainingCollector",
}
"""Name to `module:class`; imported only when used, so that one missing package disables one source."""


class Setup(msgspec.Struct, frozen=True):
    """What a collector is made with: `Class(setup, **options)`. `root` stands in front of every system path
    (`/proc`, `/sys`, `/dev`), so tests run on recorded trees."""

    clock: Clock
    root: Path = Path("/")


def create(name: str, options: Mapping[str, Any], setup: Setup | None = None) -> Collector:
    """Make a collector. `options` are its keyword arguments; text values are converted to the annotated type.

    Raises ConfigError for an unknown name, option or value, naming what is known.
    """
    if name not in COLLECTORS:
        raise ConfigError(f"collector {name!r} does not exist; known: {', '.join(COLLECTORS)}")
    module_name, _, class_name = COLLECTORS[name].partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("forewarn"):
            raise
        raise ConfigError(
            f"collector {name} needs the package {error.name!r}: pip install 'forewarn[agent]'"
        ) from error
    return _build(name, factory, options, setup or Setup(SystemClock()))


def option_types(factory: Any) -> dict[str, Any]:
    """The options of a collector class: keyword-only arguments of `__init__` with their types."""
    import inspect
    from typing import get_type_hints

    hints = get_type_hints(factory.__init__)
    return {
        p.name: hints.get(p.name, str)
        for p in inspect.signature(factory.__init__).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _required(factory: Any) -> list[str]:
    """Options without a default."""
    import inspect

    parameters = inspect.signature(factory.__init__).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]


def _build(name: str, factory: Any, options: Mapping[str, Any], setup: Setup) -> Collector:
    known = option_types(factory)
    converted: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            raise ConfigError(
                f"collector {name}: unknown option {key!r}; known: {', '.join(sorted(known)) or 'none'}"
            )
        try:
            converted[key] = _convert(value, known[key])
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"collector {name}: option {key} = {value!r} is not valid: {error}") from error
    for key in _required(factory):
        if key not in converted:
            raise ConfigError(f"collector {name}: option {key!r} must be set, for example --set {key}=...")
    collector: Collector = factory(setup, **converted)
    return collector


def _convert(value: Any, kind: Any) -> Any:
    """From text (a command line) or TOML to the annotated type; a list may be given with commas."""
    from typing import get_args, get_origin

    if isinstance(value, str) and type(None) in get_args(kind):
        kind = next(
            k for k in get_args(kind) if k is not type(None)
        )  # `list[str] | None` from text is a list
    if isinstance(value, str) and get_origin(kind) is list:
        value = [v.strip() for v in value.split(",") if v.strip()]
    if isinstance(value, str) and get_origin(kind) is dict:
        pairs = [v.split("=", 1) for v in value.split(",") if v.strip()]
        value = {k.strip(): v.strip() for k, v in pairs}
    return msgspec.convert(value, kind, strict=False, dec_hook=_path)


def _path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path) and isinstance(value, str):
        return Path(value)
    raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
