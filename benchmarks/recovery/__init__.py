"""What a killed worker costs: how long training stands still, which steps are done again, which samples are lost."""
