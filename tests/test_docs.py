"""The documents: pictures and lists are what the code is, and every link leads somewhere."""

import re
import runpy
from pathlib import Path

import pytest

from titanlite.parallel.parallelize import ORDER, WHOLE

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        ROOT / "tests/README.md",
    ]
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="module")
def pictures():
    return runpy.run_path(str(ROOT / "docs" / "pictures.py"))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("name", ["rooms", "order", "mesh", "loss", "images/top"])
def test_a_picture_is_what_the_code_draws(pictures, name):
    drawn = pictures["PICTURES"][name]()
    assert (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8") == drawn, (
        "run: python docs/pictures.py"
    )


def test_every_picture_is_shown():
    shown = {
        target
        for page in PAGES
        for target in re.findall(r"!\[[^\]]+\]\((?:docs/)?([^)]+\.svg)\)", read(page))
    }
    docs = ROOT / "docs"
    assert shown == {str(path.relative_to(docs)) for path in docs.rglob("*.svg")}


def test_the_list_of_the_fixed_order_is_the_order(pictures):
    page = read(ROOT / "docs" / "parallelism.md")
    section = page.partition("## The fixed order")[2].partition("\n## ")[0]
    assert re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE) == pictures["technique_names"](
        [*WHOLE, *ORDER]
    )


@each_page
def test_every_link_leads_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert not broken


@each_page
def test_every_source_file_that_a_document_names_exists(page):
    """Paths begin at the root, at the page or, for short, in titanlite/."""
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|sh|slurm))\b", read(page)))
    folders = (ROOT, page.parent, ROOT / "titanlite")
    missing = sorted(
        name for name in named if not any((folder / name).exists() for folder in folders)
    )
    assert not missing


def test_the_size_of_a_step_in_the_readme_is_that_of_ring_1():
    count = runpy.run_path(str(ROOT / "scripts" / "count.py"))
    (words,) = re.findall(r"about ([\d,]+) tokens of\s+code", read(ROOT / "README.md"))
    tokens = sum(map(count["tokens"], count["rings"]()[1]))
    assert abs(int(words.replace(",", "")) / tokens - 1) < 0.03, f"ring 1 has {tokens:,} tokens"
