"""DiLoCo and FedAvg: workers train locally and synchronise every N steps, over a slow link.

A worker is an ordinary run with its own ranks, data and checkpoints; it sends its parameter differences to the sync
server (`shardwise diloco-server`), which averages them, makes the outer step and returns the new parameters.
"""
