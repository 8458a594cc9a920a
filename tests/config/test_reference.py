"""docs/configuration.md and --help are made from the schema, and every key says what it is for."""

from pathlib import Path

import unirl
from unirl.config.catalog import nearest_keys, walk
from unirl.config.command import help_text
from unirl.config.reference import render
from unirl.config.rules import RULES
from unirl.config.schema import TrainConfig

PAGE = Path(unirl.__file__).parent.parent / "docs" / "configuration.md"
ENTRIES = list(walk(TrainConfig))


def test_the_page_is_current():
    assert PAGE.read_text() == render(), "run: python -m unirl.config.reference"


def test_every_key_and_rule_is_documented():
    assert [entry.path for entry in ENTRIES if not entry.doc] == []
    assert [rule.check.__name__ for rule in RULES if not rule.text] == []


def test_help_lists_every_key():
    text = help_text([])
    assert [entry.path for entry in ENTRIES if f"  {entry.path}{':' if entry.is_section else '='}" not in text] == []


def test_a_section_default_that_its_parent_changes_is_shown():
    [entry] = [entry for entry in ENTRIES if entry.path == "algorithm.adv_norm.mean_level"]
    assert entry.default == "group"


def test_every_key_is_its_own_nearest():
    keys = [entry.path for entry in ENTRIES if not entry.is_section]
    assert [nearest_keys(key, TrainConfig) for key in keys] == [[key] for key in keys]


def test_trackers_are_those_that_exist():
    from unirl.observe.trackers import TRACKERS

    [rule] = [entry.rule for entry in ENTRIES if entry.path == "logging.trackers"]
    assert rule == f"each one of {', '.join(TRACKERS)}"
