"""`stoker top`: a snapshot drawn as lines of a terminal. Only app.py knows Textual; all else is plain text and pure."""
