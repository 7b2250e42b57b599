"""One module per family of causes; catalogue.py imports all modules it finds here."""
