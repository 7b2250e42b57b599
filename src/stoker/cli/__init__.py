"""The commands, one file for each command or pair of commands: parse the options, call another package, print."""
