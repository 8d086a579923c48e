"""Starting the ranks of a run, and what this machine can give them."""
