"""Large pages for new memory, until no caller is left."""
