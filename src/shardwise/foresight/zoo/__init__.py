"""Tests every architecture of transformers along every axis of parallelism."""
