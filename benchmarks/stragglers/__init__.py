"""Three workers, one of them four times slower: seconds until a loss is reached, by kind of sync."""
