"""Which features combine: one table, read by config checks, plans, docs and errors. Tests execute every entry."""

from shardwise.config.combinations.check import (
    CombinationVerdict,
    Conflict,
    axes_used,
    check_section,
    clashes,
    combines,
    first_clash,
    remarks,
)
from shardwise.config.combinations.features import FEATURES, Feature, feature
from shardwise.config.combinations.rules import RULES, CombinationRule

__all__ = [
    "FEATURES",
    "RULES",
    "CombinationRule",
    "CombinationVerdict",
    "Conflict",
    "Feature",
    "axes_used",
    "check_section",
    "clashes",
    "combines",
    "feature",
    "first_clash",
    "remarks",
]  # fmt: skip
