"""The real set-up and the real step of any rank of a world of any size, on tensors without memory."""
