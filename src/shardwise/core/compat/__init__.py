"""Everything of torch and transformers that has a private name, in two modules: nowhere else may one be used.

tests/core/test_seams.py holds each of them to what the rest of the package relies on, so that a version that moves one
fails there by its name. A seam that moved is an error here too: no accessor has a default that would hide it.
"""
