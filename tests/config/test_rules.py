"""Each row of the table of rules refuses a configuration of golden_refusals.txt, and accepts each
of the ways out that it tells to type."""

import pytest
from config.test_golden_refusals import compose_line, named_files, sections  # noqa: F401  (a fixture)

from pgtoolkit.config.compose import compose
from pgtoolkit.config.rules.rule import Rule
from pgtoolkit.config.rules.table import TABLE
from pgtoolkit.config.validate import validate
from pgtoolkit.system.report import Report, key_of


def refused_by(rule: Rule, overrides: list[str]) -> bool:
    """Return whether a rule refuses what the overrides compose."""
    report = Report()
    rule(compose(overrides).config, report)
    return bool(report.problems)


@pytest.mark.usefixtures("named_files")
def test_each_row_refuses_a_configuration_and_accepts_its_ways_out():
    lines = [line.partition(" -> ") for _, rows in sections() for line in rows]
    refused = [line for line, _, outcome in lines if outcome.startswith("refused: ")]
    configs = {line: compose_line(line).config for line in refused if not line.startswith("[")}
    for rule in TABLE:
        report = Report()
        found = None
        for line, config in configs.items():
            if config is not None:
                rule(config, report)
            if report.problems:
                found = line
                break
        assert found is not None, f"golden_refusals.txt has no line for {rule}"
        for way_out in (rule.use or rule.needs).replace("FOLDER", "hub/name").split(" or "):
            typed = way_out.split()
            others = [word for word in found.split() if key_of(word) not in map(key_of, typed)]
            composed = compose([*others, *typed])
            assert composed.problems == [], f"{found} {way_out}"
            _, report = validate(composed.config, composed.choices)
            assert report.problems == [], f"{found} {way_out}"
