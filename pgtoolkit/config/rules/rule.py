"""A rule between settings, as a row that states itself."""

from __future__ import annotations

import functools

from pgtoolkit.config.keys import OPTION_KEYS, in_words, shown
from pgtoolkit.config.own_code import chosen
from pgtoolkit.config.schema import Config
from pgtoolkit.system.conditions import holds, joined_singles, parts, singles, value_of
from pgtoolkit.system.declared import Needed
from pgtoolkit.system.report import Report, text


class Rule(Needed):
    """A row between keys of any groups.

    Called with a configuration, it adds its refusal to the report.
    """

    @classmethod
    def of(cls, needed: Needed) -> Rule:
        """Return the rule for a condition that settings declare of themselves."""
        return cls(needed.when, needed.needs, needed.because, needed.use)

    def __call__(self, config: Config, report: Report) -> None:
        needs = _by_keys(self.needs)
        when = _by_keys(self.when)
        if not holds(when, config) or holds(needs, config):
            return
        setting = parts(singles(when)[0])[0]
        failing = next(single for single in singles(needs) if not holds(single, config))
        report.refuse(
            setting=_with_value(setting, config),
            needs=in_words(needs),
            got=_got(parts(failing)[0], config),
            reason=self.because,
            use=self.use or self.needs,
        )


@functools.cache
def _by_keys(condition: str) -> str:
    """Return a condition with the keys that name options in the place of their groups."""
    words = ""
    for joiner, single in joined_singles(condition):
        name, operator, value = parts(single)
        words += f"{joiner}{OPTION_KEYS.get(name, name)}{operator}{value}"
    return words


def _got(name: str, config: Config) -> str:
    """Return a value as a refusal shows what it got: an option with its group."""
    return _with_value(name, config) if shown(name) != name else text(value_of(config, name))


def _with_value(name: str, config: Config) -> str:
    """Return a key and its value as the user types them: an option as that of its group."""
    group = shown(name)
    value = value_of(config, name) if group == name else chosen(config, group)
    return f"{group}={text(value)}"
