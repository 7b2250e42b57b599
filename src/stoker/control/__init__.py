"""The control plane: watches, decides, starts, stops, explains. No torch below this line."""
