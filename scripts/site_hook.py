"""Add pages outside docs/ to the site: the README becomes its first page, and other pages of the
root join it.

A link to a file that is not a page is replaced by its text, since the site may be read without the
repository.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_MORE = "CONTRIBUTING.md AGENTS.md CHANGELOG.md SECURITY.md".split()
PAGES = {"README.md": "index.md"} | {page: page for page in _MORE}
"""Files of the repository by their name in the site, whose root is docs/."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Make the links of a page lead to pages of the site."""
    sources = {name: source for source, name in PAGES.items()}
    own = ROOT / sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups(default="")
        if ":" in target or not target:
            return found[0]
        path = (own.parent / target).resolve().relative_to(ROOT).as_posix()
        name = PAGES.get(path, path.removeprefix("docs/"))
        if name == path and path not in PAGES:
            return text.removeprefix("!")[1:-1]
        depth = "../" * page.file.src_uri.count("/")
        return f"{text}({depth}{name}{anchor})"

    return re.sub(r"(!?\[[^\]]*\])\(([^)#\s]*)(#[^)\s]*)?\)", link, markdown)
