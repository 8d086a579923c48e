"""`shardwise watch`: what runs write, read as it grows and shown in a browser, a terminal, or one page to pass on."""
