"""Specifications of devices, links and clusters: the catalogue, measurements on this host, FLOPs of a model."""
