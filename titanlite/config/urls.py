"""URLs of object stores, split into bucket and name; nothing is opened here."""

import re

LEGAL_URLS = "s3://, gs:// or az://BUCKET/FOLDER"
COPY_FIRST = "must be a folder here: copy it first, e.g. aws s3 cp --recursive URL FOLDER"
_URL = re.compile(r"((?:s3|gs|az)://[^/]+)(?!.*//)(?:/(.*))?")


def is_url(text: str) -> bool:
    """Return whether a text is a URL of any kind, rather than a local folder."""
    return "://" in text


def split_url(url: str) -> tuple[str, str] | None:
    """Return the bucket of a URL and the name in it; None if it is not a legal URL of a store."""
    found = _URL.fullmatch(url)
    if found is None:
        return None
    return found[1], (found[2] or "").strip("/")
