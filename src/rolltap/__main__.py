"""`python -m rolltap`: the command line."""

from rolltap.cli.main import main

main()
