"""Requests that a store refused or did not answer, as one line with the cause."""

import re

from titanlite.errors import FAILED, UserError


class BucketError(UserError):
    """A request that a store refused."""


class Unreachable(BucketError):
    """A request that a store did not answer, which is not the user's fault."""

    code = FAILED


WHOLE = "the store answers a range with the whole object"
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_CAUSES = {
    **dict.fromkeys(NO_BUCKET, "there is no such bucket"),
    **dict.fromkeys(
        ("PermissionDenied", "403 Forbidden"), "the credentials do not allow this (or are wrong)"
    ),
    **dict.fromkeys(("Unauthenticated", "status code: 401"), "the credentials were not accepted"),
    "ExpiredToken": "the credentials have expired",
    "redirect": "another region has the bucket: set AWS_REGION",
    "dns error": "the host is unknown",
    "refused": "nothing listens there",
    "Timeout": "no answer in time",
    "non-partial response": WHOLE,
    "BadDigest": "the bytes were corrupted in transit",
    "SlowDown": "the store is too busy",
    "429 Too Many": "the store is too busy",
}
_NO_ANSWER = (
    "dns error",
    "refused",
    "Timeout",
    "SlowDown",
    "sending request",
    "code: 5",
    "429 Too Many",
)


def explain(url: str, error: Exception) -> BucketError:
    """Return an error of a client as one line with its cause."""
    text = f"{type(error).__name__} {error}"
    part = re.search(r"[?&]partNumber=(\d+)", text)
    if part:
        url += f", part {part[1]}"
    code = text.partition("<Code>")[2].partition("</Code>")[0]
    causes = [why for mark, why in _CAUSES.items() if mark in text]
    causes.append(str(error).strip().partition("\n")[0].rpartition(" - ")[2])
    kind = BucketError
    if any(mark in text for mark in _NO_ANSWER):
        kind = Unreachable
    cause = causes[0]
    if code:
        cause += f" ({code})"
    return kind(f"{url}: {cause}")
