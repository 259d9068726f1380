"""The short hash by which data sets and their caches are recognized."""

import hashlib


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
