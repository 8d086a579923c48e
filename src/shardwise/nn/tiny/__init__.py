"""Tiny models of a class, on which a large one's behaviour is tested."""
