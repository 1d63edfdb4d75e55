"""Hides what looks like a secret in everything that is written (`redact`), and knows names of files
that hold some."""

from __future__ import annotations

import fnmatch
import re

_STRONG = (
    r"passw(?:or)?d|passphrase|pwd|secret|credentials?|authorization|"
    r"(?:api|access|private|account|signing)[_-]?key"
)
_VALUE = r"""(?!\*\*\*)(?:"[^"\n]*"|'[^'\n]*'|(?:(?:Bearer|Basic|Token)[ ]+)?[^\s"']+)"""
_FORMS = (
    (
        r"-----BEGIN ([A-Z ]*)PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        r"-----BEGIN \1PRIVATE KEY-----***",
    ),
    # URLs: user and password, also one with a slash in it; parameters of a query.
    (r"(?<=://)[^\s/?#\"']{0,300}@", "***@"),
    (r"(?<=://)[^\s/?#@:\"']{0,300}:(?!\d+[/?#])[^\s@\"']{0,300}@", "***@"),
    # MLflow's orderByKey and viewStateShareKey, in addresses that pgtk prints, name a column and a
    # view.
    (
        r"([?&;](?!(?:orderBy|viewStateShare)Key=)[\w.-]*(?:token|key|auth|sig|signature|passw(?:or)?d|pass|pwd|pw|secret|credentials?|jwt|sas)=)[^&\s#\"']+",
        r"\1***",
    ),
    # Names with their values: password=..., "api_key": "...", AWS_SECRET_ACCESS_KEY=..., or
    # --password and its value.
    (rf"((?:{_STRONG})[\w.-]*[\"']?\s*[=:]\s*){_VALUE}", r"\1***"),
    # The value may be the next entry of a list: "--api-key", "..." or, in YAML, one line further.
    (
        rf"((?<![\w-])--[\w-]*(?:{_STRONG}|token)(?:[\"']?\s*,\s*|\s*\n\s*-\s+|\s+(?!-\s))){_VALUE}",
        r"\1***",
    ),
    # `token = tokenizer.pad_token` is code, and `token: 12` counts tokens. A bare word behind
    # spaces is taken for a secret only if it has a digit.
    (r"(token[\"']?(?:\s*[=:]\s*(?=[\"'])|=|:\s*))(?!\d{1,6}\b|[\w.]*[.(\[])" + _VALUE, r"\1***"),
    (r"(token\s+[=:]\s*)(?=\S*\d)(?!\d{1,6}\b|[\w.]*[.(\[])" + _VALUE, r"\1***"),
    # Secrets that are known by their beginning.
    (
        r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|ASIA|dapi|AIza)(?=[\w-]{0,200}\d)[\w-]{16,200}",
        "***",
    ),
    (r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?", "***"),
)
_PATTERNS = [(re.compile(pattern, re.IGNORECASE | re.DOTALL), hidden) for pattern, hidden in _FORMS]


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
    for pattern, hidden in _PATTERNS:
        text = pattern.sub(hidden, text)
    return text
