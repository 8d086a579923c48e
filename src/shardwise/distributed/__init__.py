"""The mesh of ranks, process groups, and what links between ranks can do."""
