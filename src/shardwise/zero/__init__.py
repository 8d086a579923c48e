"""ZeRO on FSDP2."""
