"""`shardwise bench`: measured speed of this machine, and of a run on it."""
