"""Rehearsal: the real set-up and the real step of any rank of a world of any size, on fake tensors without memory."""
