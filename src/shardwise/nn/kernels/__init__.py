"""Kernels: each has a plain reference, a Triton version, and one function that picks between them."""
