"""Knowing before running: plan, rehearse, verify, bench, the zoo, and reports on data."""
