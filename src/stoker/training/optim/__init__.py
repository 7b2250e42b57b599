"""AdamW, 8-bit AdamW, Muon, and the schedule."""
