"""Tiny models of a class, which stand for the large ones when something must be tried."""
