"""Starts the ranks of a run, on this host or through a cluster's launcher."""
