"""The mesh of ranks, process groups, and measurements of the links between ranks."""
