"""`shardwise data`: what a run would train on, before it starts."""
