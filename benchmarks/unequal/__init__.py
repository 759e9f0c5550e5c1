"""Two workers, one of them slow: lanes that move to the faster against equal shares."""
