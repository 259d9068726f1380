"""The short hash of data sets and their caches."""

import hashlib


def fingerprint(text: str) -> str:
    """Hash a text, in which the name of a file may have bytes that are not UTF-8."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
