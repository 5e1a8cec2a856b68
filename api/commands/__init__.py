"""The command line: settings, help pages, commands, logging and the process around them."""
