"""From files to masked, packed, resumable batches."""
