"""Where the values of a new trial come from: pure functions of the ledger and the trial's number."""
