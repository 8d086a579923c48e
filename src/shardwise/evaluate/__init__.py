"""Evaluates models: loss, multiple choice, scored answers, lm-eval tasks, a judge; alone or side by side."""
