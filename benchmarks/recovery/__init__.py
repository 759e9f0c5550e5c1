"""The cost of a killed worker: how long training stops, which steps are repeated, which samples are lost."""
