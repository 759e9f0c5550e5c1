"""Settings of the training loop beyond one optimizer and one update per step, and the rules between them."""
