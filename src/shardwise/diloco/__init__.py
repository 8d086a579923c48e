"""Training apart: hosts that train on their own and meet every some steps, over a slow link (DiLoCo, FedAvg).

A worker is an ordinary run with its own ranks, data and checkpoints; what it trained travels to a meeting point
(`shardwise meet`), which averages the differences, makes the outer step and hands the new parameters back.
"""
