"""The commands: parse, call one room, print. No logic."""
