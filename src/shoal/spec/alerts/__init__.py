"""The section `alerts` of a job: what somebody wants to be told."""
