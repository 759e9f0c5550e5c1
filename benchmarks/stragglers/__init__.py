"""Three workers, one of them four times slower: how long until a loss is reached, and by which kind of sync."""
