"""`stoker web`: the snapshot and the run directories as a page in the browser. assets/ draws; the rest reads and guards."""
