"""What everything stands on: errors, redaction, caches, devices and their figures, seams to torch and transformers."""
