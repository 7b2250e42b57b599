"""Questions with answers: asked, marked, counted with their confidence."""
