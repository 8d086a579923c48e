"""DiLoCo and FedAvg: workers that train independently and synchronise every N steps, over a slow link.

A worker is an ordinary run with its own ranks, data and checkpoints; it sends its parameter differences to the sync
server (`shardwise meet`), which averages them, makes the outer step and returns the new parameters.
"""
