"""Does a change of the code leave every bit as it was? The same small jobs on two commits, SHA-256 against SHA-256."""
