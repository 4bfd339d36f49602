"""What the page's files promise: nothing from elsewhere, nothing inline, nothing that makes markup of data."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import forewarn.daemon.service

PAGE = Path(forewarn.daemon.service.__file__).parent / "page"
SCRIPTS = sorted(PAGE.glob("*.js"))


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def elements() -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed((PAGE / "index.html").read_text(encoding="utf-8"))
    return parser.found


def test_no_inline_script_or_style(elements: list[tuple[str, dict[str, str | None]]]) -> None:
    assert [tag for tag, _ in elements if tag == "style"] == []
    for tag, attributes in elements:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
        if tag == "script":
            assert attributes.get("src")


def test_every_referenced_file_exists(elements: list[tuple[str, dict[str, str | None]]]) -> None:
    named = [
        a.get("src") if tag == "script" else a.get("href") for tag, a in elements if tag in ("script", "link")
    ]
    assert named
    for name in named:
        assert name and (PAGE / name).is_file()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_import_only_their_neighbours(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r'from "([^"]+)"', text):
        assert name.startswith("./") and (PAGE / name).is_file()


@pytest.mark.parametrize("path", [*SCRIPTS, PAGE / "app.css", PAGE / "index.html"], ids=lambda p: p.name)
def test_nothing_is_asked_of_another_host(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text.replace("// ", ""))
    assert "@import" not in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_data_never_becomes_markup_or_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for risky in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert risky not in text


def contrast(one: str, other: str) -> float:
    """WCAG contrast ratio of two `#rrggbb` colours."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


TEXT_PAIRS = [
    *[(ink, ground) for ink in ("ink", "muted", "accent") for ground in ("bg", "surface", "sunken")],
    *[(level, f"{level}-soft") for level in ("healthy", "watch", "warning", "critical")],
    *[(level, "surface") for level in ("warning", "critical")],
    ("accent", "accent-soft"),
    ("surface", "accent"),
    ("bg", "ink"),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_holds_wcag_aa(scheme: str) -> None:
    text = (PAGE / "app.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)[:2]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    if scheme == "dark":
        colours |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", dark))
    for ink, ground in TEXT_PAIRS:
        assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
