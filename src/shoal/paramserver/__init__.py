"""A replicated parameter server: processes that hold the parameters in chunks and update them."""
