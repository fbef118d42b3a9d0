"""What a model is not told about the machine it runs on: paths, keys and passwords."""

from __future__ import annotations

import os
import re

MAX_LENGTH = 300
"""Characters of a text that are looked at and kept."""

_PATH = re.compile(
    r"""(?<=['"])/[^'"\n]+(?=['"])"""  # as OSError quotes it, spaces and all
    r"""|(?:file://|(?<![\w.:/]))(?:/[\w.@+~-]+){2,}/?"""
)
_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_SECRET = re.compile(
    r"\b(?:sk|pk|rk)-[\w-]{16,}|\bgh[a-z]_\w{20,}|\bhf_\w{20,}|\bxox[a-z]-[\w-]{10,}|\bAKIA[A-Z0-9]{16}|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{10,}\.[\w-]+\.[\w-]*"  # a JSON web token
    r"|(?<=://)[^/\s@]+(?=@)"  # user and password in a URL
)
_NAMED = re.compile(
    r"""((?:(?:api|access|secret|private)[_-]?key|secret|passw(?:or)?d|authorization)["']?\s*[=:]\s*["']?)"""
    r"""(?:(?:bearer|basic)\s+)?[^\s"'&,;]{6,}"""
    # "Unexpected token: identifier" is no secret; a token has digits.
    r"""|((?:token|bearer)["']?(?:\s*[=:]\s*|\s+)["']?)(?=[^\s"'&,;]*\d)[^\s"'&,;]{8,}""",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """``text`` without what looks like a secret.

    Secrets are values of environment variables whose names say so, keys in the forms that services give out,
    passwords in URLs, and what stands after words such as ``api_key=``.
    """
    for name, value in os.environ.items():
        if len(value) >= 8 and value in text and _SECRET_NAME.search(name):
            text = text.replace(value, "[secret]")
    return _NAMED.sub(r"\1\2[secret]", _SECRET.sub("[secret]", text))


def redact(text: str, *, end: bool = False) -> str:
    """The beginning (or ``end``) of ``text`` without file paths of this machine and :func:`without_secrets`."""
    looked_at = text[-4 * MAX_LENGTH :] if end else text[: 4 * MAX_LENGTH]
    clean = _PATH.sub("…", without_secrets(looked_at))
    return clean[-MAX_LENGTH:] if end else clean[:MAX_LENGTH]
