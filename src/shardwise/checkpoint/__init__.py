"""Checkpoints: sharded, hashed, atomic; and the export to a Hugging Face folder."""
