"""The `rolltap` command, installed and as `python -m rolltap`: Ctrl-C ends it also while its modules load."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        if sys.argv[1:2] == ["node"]:
            from rolltap.harnesses.runtimes.disk import keep_mounts

            keep_mounts()  # must precede the first thread
        from rolltap.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
