"""A rule between settings, as a row that states itself."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from pgtoolkit.config.conditions import holds, joined_singles, parts, singles, value_of
from pgtoolkit.config.keys import OPTION_KEYS, in_words, shown
from pgtoolkit.config.own_code import chosen
from pgtoolkit.config.schema import Config
from pgtoolkit.system.report import Report, text


@dataclass(frozen=True)
class Rule:
    """Two conditions: where the first holds, the second has to hold, too.

    Conditions are those of `holds`; a group stands for the key that names its option, so that
    `advantage=gae` is written in the way that users type it. Called with a configuration, the rule
    adds its refusal to the report.

    when: the condition under which the rule applies. A refusal names its first part.
    needs: the condition that has to hold.
    because: the reason, in one sentence.
    use: what to type, in the place of `needs`; several ways are joined by ` or `.
    """

    when: str
    needs: str
    because: str
    use: str = ""

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
