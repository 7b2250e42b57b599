"""Formats numbers for the tables of the report."""


def thousands(value: float) -> str:
    return f"{value:,.0f}"
