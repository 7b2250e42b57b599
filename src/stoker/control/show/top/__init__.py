"""`stoker top`: draws the snapshot as lines of a terminal. Only app.py needs Textual; the rest is plain text and pure."""
