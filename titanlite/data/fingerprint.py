"""The short hash of data sets and their caches."""

import hashlib


def fingerprint(text: str) -> str:
    """Hash a text, which may contain bytes that are not UTF-8 (in file names)."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
