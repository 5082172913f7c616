"""Search over sparse vectors and compressed token vectors, ours and what others do."""
