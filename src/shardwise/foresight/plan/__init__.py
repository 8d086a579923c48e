"""The planner: hardware specifications, memory and time estimates of a run, and the search for the best strategy."""
