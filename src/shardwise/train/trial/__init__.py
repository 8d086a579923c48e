"""The start-up trial: a tiny model of the run's class, parallelised as the run is, against one process."""
