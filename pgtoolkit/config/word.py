"""The declaration of a word that is no key, option or metric."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Word:
    """A word that is typed or read, with its meaning.

    type: what a column or a parameter holds. see: the page of docs/ that says more. symbols: those
        of equations that `help` defines.
    """

    name: str
    help: str
    type: str = ""
    see: str = ""
    symbols: tuple[str, ...] = ()
