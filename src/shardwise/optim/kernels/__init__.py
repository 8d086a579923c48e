"""Optimizer updates in one pass over memory."""
