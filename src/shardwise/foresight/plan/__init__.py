"""The planner: what hardware can do, what a run needs of it, and which division of the run is the best."""
