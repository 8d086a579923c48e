"""What is trained beside a frozen model, and the few bits that stand in for its weights."""
