"""`python -m staged_pool`: the command line."""

from staged_pool.api.commands.cli import main

main()
