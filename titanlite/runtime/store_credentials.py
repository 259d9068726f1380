"""Credentials of object stores, found in the environment before a store is opened. A metadata
address, which may not answer for minutes, is used only if the environment names it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from titanlite.runtime.store_errors import BucketError


def options_of(url: str) -> dict[str, Any]:
    """Return the options that obstore needs besides the environment; raise if credentials are
    missing.
    """
    return {"s3": _s3_options, "gs": _gs_options, "az": _az_options}[url.partition(":")[0]](url)


def _s3_options(url: str) -> dict[str, Any]:
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http:")
    options: dict[str, Any] = {"unsigned_payload": not plain}  # TLS protects it, at no cost
    if "AWS_CHECKSUM_ALGORITHM" not in os.environ:  # lets the store verify what arrives
        options["checksum_algorithm"] = "CRC64NVME"
    secret = _has("AWS_SECRET_ACCESS_KEY")
    if _has("AWS_ACCESS_KEY_ID") != secret:
        raise BucketError(f"{url}: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY go together")
    # A role's address is used only if the environment names it; it may not answer for minutes.
    names = "WEB_IDENTITY_TOKEN_FILE CONTAINER_CREDENTIALS_RELATIVE_URI".split()
    is_role = _has(*[f"AWS_{name}" for name in names], "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if not secret and not is_role and os.environ.get("AWS_EC2_METADATA_DISABLED") != "false":
        options["credential_provider"] = _profile(url)
    elif not _has("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        raise BucketError(f"{url}: AWS_REGION is not set")
    return options


def _profile(url: str) -> Any:
    """Return the credentials of boto3's files and profiles."""
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except Exception as error:  # boto3 is missing, or has no credentials
        raise BucketError(
            f"{url}: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            f"or AWS_PROFILE with boto3 ({error}); "
            "AWS_EC2_METADATA_DISABLED=false asks for the machine's role"
        ) from None


def _gs_options(url: str) -> dict[str, Any]:
    files = Path.home() / ".config/gcloud/application_default_credentials.json"
    names = "APPLICATION_CREDENTIALS SERVICE_ACCOUNT SERVICE_ACCOUNT_KEY BEARER_TOKEN".split()
    if not (_has(*[f"GOOGLE_{name}" for name in names], "GCE_METADATA_HOST") or files.exists()):
        raise BucketError(
            f"{url}: no credentials: set GOOGLE_APPLICATION_CREDENTIALS; "
            "GCE_METADATA_HOST asks for the machine's account"
        )
    return {}


def _az_options(url: str) -> dict[str, Any]:
    names = "STORAGE_ACCOUNT_KEY STORAGE_SAS_KEY STORAGE_TOKEN CLIENT_ID".split()
    keys = _has(*[f"AZURE_{name}" for name in names], "IDENTITY_ENDPOINT")
    if not (keys and _has("AZURE_STORAGE_ACCOUNT_NAME")):
        raise BucketError(
            f"{url}: set AZURE_STORAGE_ACCOUNT_NAME, and _ACCOUNT_KEY or another credential"
        )
    return {}


def _has(*names: str) -> bool:
    return any(os.environ.get(name) for name in names)
