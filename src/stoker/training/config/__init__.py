"""Typed, nested settings: file < environment < flags; presets."""
