"""Hugging Face models: found, built on `meta`, and loaded shard by shard."""
