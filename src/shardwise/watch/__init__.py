"""`shardwise watch`: follows the files of runs and shows them in a browser, a terminal, or one self-contained page."""
