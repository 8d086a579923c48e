"""Measures finished models: losses, multiple choice, scored answers, standard tasks, a judge; alone or side by side."""
