"""What recomputation saves, and where: ZeRO-R."""
