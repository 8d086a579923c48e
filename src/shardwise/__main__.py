"""`python -m shardwise`, which is also how torchrun starts us."""

from shardwise.cli import main

main()
