"""Foundations: errors, redaction, caches, devices and their specifications."""
