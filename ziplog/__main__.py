"""`python -m ziplog`: the command line without its script."""

from ziplog.cli import main

main()
