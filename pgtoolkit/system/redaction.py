"""Hides what looks like a secret in everything that is written (`redact`), and knows names of files
that hold some."""

from __future__ import annotations

import fnmatch
import re

_STRONG = (
    r"passw(?:or)?d|passphrase|pwd|secret|credentials?|authorization|"
    r"(?:api|access|private|account|signing)[_-]?key"
)
_STRONG_PARTS = ["passw", "passphrase", "pwd", "secret", "credential", "authorization", "key"]
_BEGINNINGS = [
    *("hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "sk-"),
    *("xox", "akia", "asia", "dapi", "aiza"),
]
_VALUE = r"""(?!\*\*\*)(?:"[^"\n]*"|'[^'\n]*'|(?:(?:Bearer|Basic|Token)[ ]+)?[^\s"']+)"""
_FORMS = (
    (
        ["-----begin"],
        r"-----BEGIN ([A-Z ]*)PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        r"-----BEGIN \1PRIVATE KEY-----***",
    ),
    # URLs: user and password, also one with a slash in it; parameters of a query.
    (["://"], r"(?<=://)[^\s/?#\"']{0,300}@", "***@"),
    (["://"], r"(?<=://)[^\s/?#@:\"']{0,300}:(?!\d+[/?#])[^\s@\"']{0,300}@", "***@"),
    (
        ["?", "&", ";"],
        r"([?&;][\w.-]*(?:token|key|auth|sig|signature|passw(?:or)?d|pass|pwd|pw|secret|credentials?|jwt|sas)=)[^&\s#\"']+",
        r"\1***",
    ),
    # Names with their values: password=..., "api_key": "...", AWS_SECRET_ACCESS_KEY=..., or
    # --password and its value.
    (_STRONG_PARTS, rf"((?:{_STRONG})[\w.-]*[\"']?\s*[=:]\s*){_VALUE}", r"\1***"),
    # The value may be the next entry of a list: "--api-key", "..." or, in YAML, one line further.
    (
        ["--"],
        rf"((?<![\w-])--[\w-]*(?:{_STRONG}|token)(?:[\"']?\s*,\s*|\s*\n\s*-\s+|\s+(?!-\s))){_VALUE}",
        r"\1***",
    ),
    # `token = tokenizer.pad_token` is code, and `token: 12` counts tokens. A bare word behind
    # spaces is taken for a secret only if it has a digit.
    (
        ["token"],
        r"(token[\"']?(?:\s*[=:]\s*(?=[\"'])|=|:\s*))(?!\d{1,6}\b|[\w.]*[.(\[])" + _VALUE,
        r"\1***",
    ),
    (
        ["token"],
        r"(token\s+[=:]\s*)(?=\S*\d)(?!\d{1,6}\b|[\w.]*[.(\[])" + _VALUE,
        r"\1***",
    ),
    # Secrets that are known by their beginning.
    (
        _BEGINNINGS,
        r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|ASIA|dapi|AIza)(?=[\w-]{0,200}\d)[\w-]{16,200}",
        "***",
    ),
    (["eyj"], r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?", "***"),
)
"""Forms of secrets: parts in lower case, of which any secret of the form has at least one; the
pattern of the form; the replacement."""

_PATTERNS = [
    (parts, re.compile(pattern, re.IGNORECASE | re.DOTALL), hidden)
    for parts, pattern, hidden in _FORMS
]

_ALSO_LETTERS = "\u0130\u0131\u017f\u212a"
"""The letters beyond ASCII that a pattern without case takes for i, s or k."""


SECRET_FILES = (
    ".env",
    ".env.*",
    "*.env",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.kdbx",
    "id_rsa*",
    "id_ed25519*",
    ".netrc",
    "_netrc",
    ".pgpass",
    ".npmrc",
    ".pypirc",
    ".htpasswd",
    "*secret*",
    "*credential*",
    "*passw*",
    "*secret*/**",
)
"""Patterns for names of files that are never copied, in upper and lower case; those with `/**` are
of folders."""


def is_named_as_secrets(name: str) -> bool:
    """Return whether a file or folder of this name may hold secrets."""
    return any(
        fnmatch.fnmatchcase(name.lower(), pattern.removesuffix("/**")) for pattern in SECRET_FILES
    )


def redact(text: str) -> str:
    """Return the text with `***` in place of everything that looks like a secret.

    That is users and passwords in URLs, the values of names such as password, api_key or token, and
    keys of known forms. A text that was redacted before does not change.
    """
    for parts, pattern, hidden in _PATTERNS:
        if _may_match(parts, text):
            text = pattern.sub(hidden, text)
    return text


def _may_match(parts: list[str], text: str) -> bool:
    """Return whether a text may have one of these parts in upper or lower case.

    This is much quicker than the search for a pattern.
    """
    lowered = text.lower()
    return any(part in lowered for part in parts) or any(letter in text for letter in _ALSO_LETTERS)
