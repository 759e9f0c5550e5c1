"""Two workers, one of them slow: lanes that move to the faster worker against equal shares."""
