"""Every architecture of transformers along every axis of parallelism."""
