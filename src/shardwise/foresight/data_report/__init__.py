"""`shardwise data`: what a run would train on, reported before it starts."""
