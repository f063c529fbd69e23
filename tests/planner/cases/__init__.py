"""Cases that people met in public threads, each a test: fits or not, legal or not, who wins."""
