"""The data sets of this project."""

NAMES = ["books", "code"]
