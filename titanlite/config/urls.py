"""Where an object store's URL ends and the name in it begins; this opens nothing."""

import re

LEGAL_URLS = "s3://, gs:// or az://BUCKET/FOLDER"
COPY_FIRST = "must be a folder here: copy it first, e.g. aws s3 cp --recursive URL FOLDER"
_URL = re.compile(r"((?:s3|gs|az)://[^/]+)(?!.*//)(?:/(.*))?")


def is_url(text: str) -> bool:
    """Return whether a text names no folder of this machine, whatever store it names."""
    return "://" in text


def split_url(url: str) -> tuple[str, str] | None:
    """Return the bucket of a URL and the name in it; None if it is no URL of a store."""
    found = _URL.fullmatch(url)
    return (found[1], (found[2] or "").strip("/")) if found else None
