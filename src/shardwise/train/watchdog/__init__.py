"""Ends a run that stalls, and names the rank that held it up."""
