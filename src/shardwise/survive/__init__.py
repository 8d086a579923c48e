"""What keeps a long run alive, or ends it with a reason: the watch over stalled ranks, restarts, numbers gone wrong."""
