"""What activation checkpointing saves, and where: ZeRO-R."""
