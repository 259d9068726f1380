"""Text in an object store: its files are copied into the user's cache, where they are read. No
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.data.documents import Documents, chosen, refuse_empty, text_files
from titanlite.data.fingerprint import fingerprint
from titanlite.errors import format_bytes, print_notice
from titanlite.runtime import store
from titanlite.runtime.bucket import place


@dataclass(frozen=True)
class StoredDocuments(Documents):
    """Documents whose `root` is a copy, made by `bring`; it is named by their state."""

    def state(self) -> str:
        return self.root.name

    def bring(self) -> None:
        """Copy the files; those that a killed run has copied stay, but none of an older state."""
        size = format_bytes(sum(self.sizes))
        print_notice(f"{self.url}: {len(self.names)} files, {size}, are copied to {self.root}")
        for name, copy in store.list_folder(self.root.parent).items():
            if name != self.root.name:
                store.delete(copy)
        sizes = dict(zip(self.names, self.sizes, strict=True))
        store.copy_below(place(self.url), sizes, self.root)

    def forget(self) -> None:
        store.delete(self.root.parent)


def state_of(root: Path, entries: Mapping[str, Any]) -> str:
    """Hash what a list says of files below a place."""
    tags = [(name, e["size"], e.get("e_tag") or e["last_modified"]) for name, e in entries.items()]
    return fingerprint(f"{root} {sorted(tags)}")


def find_text(source: str, out: Path) -> Documents:
    """Find a file of text, or all below a folder, also in an object store; `out` owns a copy."""
    if "://" not in source:
        return text_files(source, source)
    root: Any = place(source)
    entries = root.below()
    if not entries and root.is_file():
        entries, root = {root.name: root.bucket.call("head", root.key)}, root.parent
    names, skipped = chosen({*entries}, {*entries})
    sizes = tuple(entries[name]["size"] for name in names)
    state = state_of(root, {name: entries[name] for name in names})
    copy = store.user_cache() / "text" / fingerprint(f"{source} {out}") / state
    documents = StoredDocuments(copy, tuple(names), sizes, tuple(skipped), url=str(root))
    refuse_empty(documents, source, None)
    return documents
