"""The short hash of data sets and their caches."""

import hashlib


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
