"""Attention: packed documents, softcaps and sinks, long sequences, and which path is right for a model."""
