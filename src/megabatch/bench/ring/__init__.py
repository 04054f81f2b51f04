"""One batch spread over ranks."""
