"""The command line: flags, the commands, logging, and what a process of its own needs."""
