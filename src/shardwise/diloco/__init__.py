"""DiLoCo and FedAvg: workers train locally and synchronise every N steps, over a slow link.

A worker is an ordinary run with its own ranks, data and checkpoints; what it trained travels to a sync server
(`shardwise diloco-server`), which averages the differences, makes the outer step and hands the new parameters back.
"""
