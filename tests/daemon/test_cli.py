"""The command line: exit codes, help, and errors without tracebacks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forewarn.collectors.errors import ConfigError
from forewarn.daemon import cli

TESTS = Path(__file__).parents[1]


def forewarn(*words: str, fakes: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    program = ["agent_with_fakes.py"] if fakes else ["-m", "forewarn.daemon.cli"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FOREWARN_")}
    return subprocess.run(
        [sys.executable, *program, *words],
        cwd=TESTS,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.EXIT_USAGE
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


@pytest.mark.parametrize("name", ["agent", "collect", "doctor", "record"])
def test_commands_of_the_node_need_nothing_of_the_centre(name: str) -> None:
    """The agent stays slim: no numpy, no pandas, no HTTP framework, no service."""
    script = f"import sys; from forewarn.daemon.cli import load_command; load_command({name!r}); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = set(run.stdout.split())
    heavy = {"numpy", "pandas", "pydantic", "httpx", "fastapi", "sqlalchemy", "structlog", "forewarn.models"}
    assert not modules & heavy
    assert not any(m.startswith(("forewarn.daemon.service", "forewarn.daemon.controller")) for m in modules)


def test_token_loads_no_models() -> None:
    """A script that makes a token for each of a thousand nodes waits for no numeric library."""
    script = "import sys; import forewarn.daemon.commands.token; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not set(run.stdout.split()) & {"lightgbm", "numba", "pandas", "numpy", "forewarn.models"}


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["agnet"])
    assert caught.value.code == cli.EXIT_USAGE


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("no", name="psutil")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"forewarn agent needs the package 'psutil'.*forewarn\[agent\]"):
        cli.load_command("agent")


def test_every_command_has_a_module() -> None:
    missing = [
        name
        for name in cli.COMMANDS
        if importlib.util.find_spec(f"forewarn.daemon.commands.{name.replace('-', '_')}") is None
    ]
    assert not missing


def test_the_readme_names_every_command_and_no_other() -> None:
    text = (TESTS.parent / "README.md").read_text(encoding="utf-8")
    table = text.split("## Commands")[1].split("Exit codes")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    quoted = [word.removeprefix("forewarn ").split()[0] for cell in cells for word in cell.split("`")[1::2]]
    assert sorted(quoted) == sorted(cli.COMMANDS)


def test_a_wrong_setting_is_code_2_and_no_traceback(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[agent]\nspol = 1\n")
    run = forewarn("collect", "lines", "--config", str(config))
    assert run.returncode == 2
    assert "c.toml:2" in run.stderr and "Traceback" not in run.stderr


def test_the_config_file_may_come_from_the_environment(tmp_path: Path) -> None:
    run = forewarn("collect", "lines", FOREWARN_CONFIG=str(tmp_path / "none.toml"))
    assert run.returncode == 2 and "none.toml" in run.stderr


def test_collect_prints_one_reading_as_json(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("1\n2\n")
    run = forewarn("collect", "lines", "--set", f"path={lines}", "--node", "n1", "--json")
    assert (run.returncode, run.stderr) == (0, "")
    told = json.loads(run.stdout)
    assert [s["device"] for s in told["samples"]] == ["n1/gpu0"]
    assert [(e["device"], e["kind"], e["code"]) for e in told["events"]] == [
        ("n1", "oom", "1"),
        ("n1", "oom", "2"),
    ]
    assert set(told["events"][0]) >= {
        "time",
        "device",
        "kind",
        "code",
        "severity",
        "action",
        "message",
        "pci",
    }
    assert told["errors"] == []


def test_collect_prints_a_table(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("1\n")
    run = forewarn("collect", "lines", "--set", f"path={lines}", "--node", "n1")
    assert run.returncode == 0
    assert "gpu_temperature_celsius" in run.stdout and "event oom 1 critical" in run.stdout


def test_collect_of_an_unavailable_source_is_code_1_with_json_all_the_same(tmp_path: Path) -> None:
    run = forewarn("collect", "lines", "--set", f"path={tmp_path / 'none'}", "--json")
    assert run.returncode == 1
    told = json.loads(run.stdout)
    assert "none" in told["errors"][0]["message"] and told["samples"] == []
    assert "none" in run.stderr and "Traceback" not in run.stderr


def test_collect_ends_at_the_deadline_of_a_hung_source_and_names_it() -> None:
    run = forewarn("collect", "hung", "--json")
    assert run.returncode == 1
    assert "hung: no answer within 0.2 s" in json.loads(run.stdout)["errors"][0]["message"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing"], ["nothing", "lines"]),
        (["lines"], ["path", "must be set"]),
        (["lines", "--set", "path"], ["KEY=VALUE"]),
        (["lines", "--set", "file=x"], ["file", "path"]),
        (["lines", "--set", "path=x", "--set", "interval_s=often"], ["interval_s", "often"]),
    ],
    ids=["unknown collector", "missing option", "no value", "unknown option", "bad value"],
)
def test_collect_usage_errors_are_code_2(words: list[str], told: list[str]) -> None:
    run = forewarn("collect", *words)
    assert run.returncode == 2
    assert all(word in run.stderr for word in told) and "Traceback" not in run.stderr


def test_doctor_says_what_is_wrong_and_the_way_out(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        "[agent]\nservice_url = 'http://127.0.0.1:9'\nspool = '/proc/none/spool.db'\n"
        f"[agent.collectors.lines.options]\npath = '{tmp_path / 'none'}'\n"
    )
    run = forewarn("doctor", "--config", str(config), "--json")
    assert run.returncode == 1
    checks = {c["name"]: c for c in json.loads(run.stdout)["checks"]}
    assert "deadline" in checks["hung"]["detail"]
    assert "none" in checks["lines"]["detail"]
    assert (checks["spool"]["status"], checks["service"]["status"]) == ("problem", "problem")
    assert "forewarn serve" in checks["service"]["remedy"] and "agent.spool" in checks["spool"]["remedy"]
    table = forewarn("doctor", "--config", str(config))
    assert table.returncode == 1 and "-> " in table.stdout and "to look at" in table.stdout


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{i}\n" for i in range(50_000)))
    collect = f"{sys.executable} agent_with_fakes.py collect lines --set path={lines}"
    command = f"{collect} | head -1; echo ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], cwd=TESTS, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1] == "0" and run.stderr == ""
