"""`python -m shardwise`, and the `shardwise` command: what comes before its first word."""

import sys


def main() -> None:
    """Runs the command; Ctrl-C is one line from the first moment on."""
    try:
        from shardwise.cli.main import main as command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
