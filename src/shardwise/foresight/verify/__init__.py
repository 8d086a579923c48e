"""`shardwise verify`: compares a run, made small, with a plain reference in one process.

shrunk_model.py  the user's model with fewer layers, as a folder that transformers and Shardwise both read
claims.py        what is to be shown, one change at a time
plain.py         the reference: one document at a time, no line of it shared with what is proven
measure.py       the run's own code on real ranks, held against the reference
host.py          the process that the ranks are forked from; ranks.py is the other end of its pipe
prove.py         the documents, the reference and one claim after the other; compare.py says how far apart is the same
"""
