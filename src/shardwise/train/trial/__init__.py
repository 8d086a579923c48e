"""The start-up trial: a tiny model, parallelised as the run is, against one process."""
