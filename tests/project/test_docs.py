"""A newcomer finds every page from the README, and no link in any page leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md"))
    if ".venv" not in path.parts
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def links(page: Path) -> list[tuple[Path, str]]:
    """(file or folder, anchor) of every link to this repository."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = []
    for target in LINK.findall(text):
        if "://" not in target and not target.startswith("mailto:"):
            path, _, anchor = target.partition("#")
            found.append(((page.parent / path).resolve() if path else page, anchor))
    return found


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {target.name}#{anchor}"


def test_every_page_is_one_step_from_the_readme() -> None:
    linked = {target for target, _ in links(ROOT / "README.md")}
    missing = [
        path.name for path in PAGES if path.parts[-2] != "peers" and path.name != "README.md" and path not in linked
    ]
    assert not missing, f"no link in README.md to {missing}"


def test_nobody_is_sent_to_an_index_for_our_package() -> None:
    """It is on none: `pip install dynamo-semkv` would find nothing, or somebody else's."""
    sources = [
        *ROOT.glob("dynamo_semkv/**/*.py"),
        *ROOT.glob("worker_connector/**/*.py"),
        *ROOT.glob("graphs/**/*.*"),
        *PAGES,
    ]
    wrong = [
        f"{path.name}: {line.strip()}"
        for path in sources
        if path.suffix in (".py", ".md", ".sh", ".yaml") and path != ROOT / "CHANGELOG.md"
        for line in path.read_text().splitlines()
        if re.search(r"""install (--?[\w-]+ )*['"]?dynamo[-_]semkv""", line) and "would find nothing" not in line
    ]
    assert not wrong
