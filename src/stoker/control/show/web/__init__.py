"""Serves `stoker web`, which shows runs and machines in the browser: these modules read and guard the data, assets/ draws it."""
