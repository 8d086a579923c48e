"""Context parallelism: each rank holds a part of every row; only attention reads other parts."""
