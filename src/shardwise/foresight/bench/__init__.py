"""`shardwise bench`: what this machine does in practice, and how fast a run is on it."""
